"""What `noloco node limits` sends to nodes, and says of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from node.giving.limits import Limit, as_settings, of_one_node, without_none
from node.watch.health import Report
from node.watch.words import called

NAME_COLUMNS, LIMIT_COLUMNS = 16, 12


def as_order(wishes: Mapping[str, Limit], nodes: int) -> dict[str, Limit]:
    """The limits for each of so many nodes, which share the network. Raises `UserError` for what is no limit."""
    as_settings(wishes)  # checks them, before any node is asked
    return of_one_node(without_none(wishes), nodes)


def name_in(report: Report) -> str:
    """Name the node that reports, for people."""
    return called(str(report.get("name") or ""), str(report.get("peer")))


def told(report: Report) -> list[str]:
    """Lines about a node's limits: each with what it limits, as it is at present."""
    device = f" on {report['device']}" if report.get("device") else ""
    lines = [f"Node {name_in(report)}{device}: {report.get('state')}."]
    if report.get("paused"):
        lines.append(f"It rests: {report['paused']}")
    for name, of in (report.get("limits") or {}).items():
        line = f"  {name:<{NAME_COLUMNS}}{of['limit'] or 'none':<{LIMIT_COLUMNS}}  {of['now']}"
        lines.append(line.rstrip())
    return lines


def kept_by(wishes: Mapping[str, Limit], *, is_one_of_several: bool) -> list[str]:
    """Lines on how long a change holds, and what makes it last."""
    if is_one_of_several:
        return [
            "This holds until the node ends. A settings file is for all devices of a command: to keep it, start this "
            "device's node by itself."
        ]
    settings = [f"  {line}" for line in as_settings(wishes)]
    return ["This holds until the node ends. To keep it, write into its settings file (--config):", *settings]
