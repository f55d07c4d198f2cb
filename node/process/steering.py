"""What `noloco node` may ask of a node that runs, and order."""

from __future__ import annotations

import signal

from node.giving.bandwidth import most_by_bandwidth
from node.giving.limit_watch import LimitWatch, local_time
from node.giving.limits import changed, limits_of
from node.giving.policy import VolunteerLimits
from node.machine.processes import PATIENCE
from node.process.daemon import Node
from node.service.node_resources import attempt
from node.watch.health import Orders, Report


class Steering:
    """Carries out a volunteer's orders to a node, and tells of it. Mutable state: that of the node."""

    def __init__(self, node: Node, watch: LimitWatch) -> None:
        self._node = node
        self._watch = watch

    def orders(self) -> Orders:
        return {
            "pause": lambda _: self._node.rest.ask("volunteer", "you asked for it."),
            "resume": lambda _: self._node.rest.lift("volunteer"),
            "finish": lambda _: self._finish(),
            "limits": lambda said: self.change_limits(said.get("limits")),
        }

    def _finish(self) -> None:
        self._node.stop(PATIENCE[signal.SIGINT])

    def report(self) -> Report:
        """The health of the node, its device, and each limit with what it limits."""
        node, now = self._node, self._measured()
        limits = {
            name.replace("_", "-"): {"limit": limit, "now": now.get(name, "")}
            for name, limit in limits_of(node.member.config).items()
        }
        return node.health() | {"device": node.member.config.device, "limits": limits}

    def change_limits(self, wishes: object) -> None:
        """Set other limits at once, for as long as this node runs; others are told of the new capacity.

        Raises `UserError` with what to do when one of them cannot be had here; nothing has changed then.
        """
        node = self._node
        member, service = node.member, node.service
        config = changed(member.config, wishes if isinstance(wishes, dict) else {})
        self._watch.change(VolunteerLimits.of(config), local_time())
        member.config = config
        given = ", ".join(
            f"{name.replace('_', '-')} {value}" for name, value in limits_of(config).items() if value
        )
        member.events.say(f"The limits are now: {given or 'none'}.", "limits", limits=limits_of(config))
        if service is None:
            return
        service.context.throughput.most = most_by_bandwidth(config, member.signed.manifest, service.stage)
        announcing = attempt(
            lambda: service.announce(service.public_state), "telling others of the new limits"
        )
        member.supervisor.start(announcing, "telling others of the new limits")

    def _measured(self) -> dict[str, str]:
        """What each limit limits, as it is at present, in words."""
        watch, service, now = self._watch, self._node.service, local_time()
        up, down = (f"{8e-6 * rate:.2f} Mbit/s at present" for rate in watch.line.rates())
        busy = 0.0 if service is None else service.context.compute.busy.recent_fraction()
        throttled = f"; {watch.verdict.reason}" if watch.verdict.share and watch.verdict.reason else ""
        told = {
            "max_upload": up,
            "max_download": down,
            "monthly_cap": f"{watch.line.moved(now) / 1e9:.2f} GB this month",
            "gpu_percent": f"it computes {busy:.0%} of the time{throttled}",
            "hours": f"it is {now:%a %H:%M}",
            "network_hours": f"it is {now:%a %H:%M}",
        }
        if watch.seen is not None and watch.seen.temperature is not None:
            told["max_temperature"] = f"{watch.seen.temperature:.0f} °C"
        if watch.seen is not None and self._node.member.config.only_idle:
            told["only_idle"] = watch.seen.others or "nobody else needs the machine"
        return told
