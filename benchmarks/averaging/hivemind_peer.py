"""One peer of hivemind's DecentralizedAverager over the same tensors: what the project has to beat.

`average` gives hivemind every advantage: the group was found beforehand and waits for its trigger, so that only the
all-reduce is timed. `naive` is `step()` as most programs call it, matchmaking included.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import hivemind
import torch
from coordination import Message, next_command, say, sleep_until
from hivemind.averaging.control import AveragingStage
from hivemind.averaging.partition import AllreduceException
from state import sample

MATCHMAKING_SECONDS = 1.0  # at least this long hivemind waits for a group that is not full yet
REQUEST_SECONDS = 0.8  # hivemind asks for less than the above
GROUP_DEADLINE = 120.0
POLL_SECONDS = 0.0005
TRIES = 3


class HivemindPeer:
    """Mutable state: the averager, its tensors, and the averaging that waits for its trigger."""

    def __init__(self, settings: Message) -> None:
        self._settings = settings
        self._dht: Any = None
        self._averager: Any = None
        self._step: Any = None

    def start(self) -> Message:
        self._dht = hivemind.DHT(
            host_maddrs=[f"/ip4/{self._settings['host']}/tcp/0"], start=True, use_relay=False
        )
        return {
            "peer": str(self._dht.peer_id),
            "addresses": [str(address) for address in self._dht.get_visible_maddrs()],
        }

    def meet(self, others: list[Message]) -> Message:
        """The first of the others brings this peer into the DHT."""
        torch.set_num_threads(self._settings["threads"])  # also of the processes that hivemind forks
        first = others[0]
        if first["peer"] != str(self._dht.peer_id):
            self._dht.shutdown()
            self._dht = hivemind.DHT(
                host_maddrs=[f"/ip4/{self._settings['host']}/tcp/0"],
                initial_peers=first["addresses"],
                start=True,
                use_relay=False,
            )
        size = len(others)
        self._averager = hivemind.DecentralizedAverager(
            [torch.randn(shape) for shape in self._settings["shapes"]],
            self._dht,
            prefix="gossip",
            target_group_size=size,
            min_group_size=size,
            min_matchmaking_time=MATCHMAKING_SECONDS,
            request_timeout=REQUEST_SECONDS,
            allreduce_timeout=GROUP_DEADLINE,
            start=True,
        )
        return {}

    def prepare_average(self) -> Message:
        """Find the group and let it wait."""
        self._change_tensors()
        self._step = self._averager.step(wait=False, require_trigger=True, timeout=GROUP_DEADLINE)
        while self._step.stage is not AveragingStage.AWAITING_TRIGGER:
            if self._step.done():
                self._step.result()
            time.sleep(0.01)
        return {}

    def average(self, at: float) -> Message:
        before = self._sample()
        sleep_until(at)
        self._step.allow_allreduce()
        members = self._step.result(GROUP_DEADLINE)
        return self._report(time.monotonic() - at, before, len(members), 0.0)

    def prepare_naive(self) -> Message:
        self._change_tensors()
        return {}

    def naive(self, at: float) -> Message:
        before = self._sample()
        sleep_until(at)
        for tries_left in reversed(range(TRIES)):  # on a busy machine it does not find its group each time
            step = self._averager.step(wait=False, timeout=GROUP_DEADLINE)
            while not step.done() and step.stage.value < AveragingStage.RUNNING_ALLREDUCE.value:
                time.sleep(POLL_SECONDS)
            matchmaking = time.monotonic() - at
            try:
                members = step.result(GROUP_DEADLINE)
                break
            except AllreduceException:
                if not tries_left:
                    raise
        return self._report(time.monotonic() - at, before, len(members), matchmaking)

    def rest(self) -> Message:
        return {}

    def stop(self) -> None:
        if self._averager is not None:
            self._averager.shutdown()
        self._dht.shutdown()

    def _change_tensors(self) -> None:
        with self._averager.get_tensors() as tensors:
            for tensor in tensors:
                tensor.add_(torch.randn(1).item())

    def _report(self, seconds: float, before: list[float], members: int, matchmaking: float) -> Message:
        return {
            "seconds": seconds,
            "matchmaking": matchmaking,
            "members": members,
            "before": before,
            "after": self._sample(),
        }

    def _sample(self) -> list[float]:
        with self._averager.get_tensors() as tensors:
            return sample(max(tensors, key=torch.Tensor.numel).view(-1))


def main(settings: Message) -> None:
    peer = HivemindPeer(settings)
    say(peer.start())
    try:
        while (command := next_command()) is not None:
            say(getattr(peer, command.pop("command"))(**command))
    finally:
        peer.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
