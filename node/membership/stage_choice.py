"""Picks the stage that a newcomer takes, of those that its machine can serve (`Abilities`).

Each newcomer decides for itself from the same records, by pure functions. First comes the stage that can do least,
since the swarm is as fast as that. Stages that are closer than can be measured count as equally poor; of those a
newcomer takes the one to which its links are best, as far as it knows them.

What its links do to the steps of the run is the planner's step time (docs/placement.md) where a microbatch's way is
what takes time: L·(1 + (B − 1)/F) + G/k, with L twice the sum of the mean hops and G the mean time of a pair's
exchange. A newcomer of a stage with n replicas changes the mean hops and the mean exchange by 1/(n + 1) of the
difference between its own links and theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from node.config import NodeConfig
from node.data.opening import LOCAL
from node.machine.accelerator import shares_memory
from node.machine.limits import Room, host_room
from node.membership.capacity import Capacities, Peer
from node.membership.data_source import DataSupply
from node.model.memory_model import memory_of_state
from node.model.resources import (
    nbytes_of_checkpoint,
    require_disk,
    require_host_memory,
    require_memory,
    room_on,
    stages_that_fit,
)
from node.storage.checkpoint_files import COPIES, nbytes_by_stage
from node.storage.state_directory import StateDirectory
from protocol.errors import UserError
from protocol.ground import PeerId
from protocol.records.announcement import PEER_CHARACTERS, LinkReport
from protocol.run.manifest import Manifest

ALIKE = 1.08  # capacities within this factor count as equal: equal machines measure themselves that far apart

IN_FLIGHT = 16  # F, microbatches of a replica on the way: what the planner takes, too

Arrival = tuple[float, PeerId]  # wall clock and peer id: the order in which newcomers have their turn


def poorest_stages(capacities: Capacities, allowed: Collection[int]) -> list[int]:
    """The stages among those allowed that can do least: the one with the fewest replicas first, then the earliest."""
    least = min(capacities.of[stage] for stage in allowed)
    alike = [stage for stage in allowed if capacities.of[stage] <= ALIKE * least]
    return sorted(alike, key=lambda stage: (capacities.replicas[stage], stage))


def choose_stage(
    peers: Sequence[Peer],
    work: Sequence[float],
    newcomers: Collection[Arrival],
    me: Arrival,
    may_serve: Collection[int],
    excess: Mapping[int, float] | None = None,
) -> int:
    """The stage for `me`, one of several newcomers that choose at the same time.

    `peers` are those that have a stage already. `newcomers` are taken in the order of their arrival, and those
    before `me` are expected to go where the swarm is poorest. `excess`: see `excess_seconds`; without it
    the stage with the fewest replicas is taken among equally poor ones.
    """
    capacities = Capacities(peers, work)
    for newcomer in sorted(set(newcomers)):
        if newcomer >= me:
            break
        capacities.add_newcomer(poorest_stages(capacities, range(len(work)))[0])
    stages = poorest_stages(capacities, may_serve)
    return min(stages, key=lambda stage: excess.get(stage, 0.0)) if excess else stages[0]


def better_stage(
    peers: Sequence[Peer],
    work: Sequence[float],
    me: PeerId,
    may_serve: Collection[int],
    *,
    by_links: bool = False,
    is_last_word: bool = False,
) -> int | None:
    """The stage that `me`, whose claim is among the `peers`, should take instead when too many newcomers met at one.

    Of the newcomers at a stage only the last one to come goes elsewhere, so that not all who met there leave; with
    `is_last_word` any does. One that chose among equally poor stages `by_links` stays while they are equally poor.
    """
    capacities = Capacities(peers, work)
    mine = capacities.peers[me]
    newcomers = [p for p in capacities.peers.values() if p.stage == mine.stage and not p.is_serving]
    if not is_last_word and any((p.since, p.peer) > (mine.since, me) for p in newcomers):
        return None
    others = Capacities([p for p in capacities.peers.values() if p.peer != me], work)
    stages = poorest_stages(others, may_serve)
    is_smallest = others.replicas[mine.stage] == others.replicas[stages[0]]
    if mine.stage in stages and (by_links or is_smallest):
        return None
    return stages[0]


@dataclass(frozen=True)
class Volumes:
    """Bytes of a microbatch's activations and of a round's exchange in a run, and how often each travels."""

    activations: int
    exchange: int
    microbatches: int  # B, of an inner step
    inner_steps: int  # k, of a round


class LinkTable:
    """Link estimates between any two peers, as either of them reports them, both directions alike."""

    def __init__(self) -> None:
        self._round_trips: dict[frozenset[str], float] = {}
        self._bandwidths: dict[frozenset[str], float] = {}

    def add(self, peer: PeerId, reports: Iterable[LinkReport]) -> None:
        """Add a peer's reports. The longer of two round trips counts, and the slower of two bandwidths."""
        for report in reports:
            pair = frozenset((peer[-PEER_CHARACTERS:], report.peer))
            self._round_trips[pair] = max(report.round_trip, self._round_trips.get(pair, 0.0))
            if report.bandwidth is not None:
                known = self._bandwidths.get(pair, report.bandwidth)
                self._bandwidths[pair] = min(report.bandwidth, known)

    def seconds(self, one: PeerId, other: PeerId, nbytes: int) -> float | None:
        """Seconds that so many bytes take one way; None when the link is not known."""
        pair = frozenset((one[-PEER_CHARACTERS:], other[-PEER_CHARACTERS:]))
        if pair not in self._round_trips or pair not in self._bandwidths:
            return None
        return self._round_trips[pair] / 2 + nbytes / self._bandwidths[pair]

    def mean_seconds(self, some: Sequence[PeerId], others: Sequence[PeerId], nbytes: int) -> float | None:
        """Mean seconds for so many bytes over the known links between the two groups; None when there are none."""
        times = [self.seconds(a, b, nbytes) for a in some for b in others if a != b]
        known = [time for time in times if time is not None]
        return fmean(known) if known else None


def excess_seconds(
    me: PeerId, members: Mapping[int, Sequence[PeerId]], links: LinkTable, volumes: Volumes, stage: int
) -> float:
    """Seconds by which a step of the run gets longer when `me` joins the stage; less than 0 when it gets shorter.

    `members` of every stage. What is not known makes no difference.
    """
    own = members.get(stage, [])
    hops = sum(
        _difference(me, own, members.get(next_to, []), links, volumes.activations)
        for next_to in (stage - 1, stage + 1)
    )
    exchange = _difference(me, own, own, links, volumes.exchange)
    waiting = 1 + (volumes.microbatches - 1) / IN_FLIGHT
    return (2 * hops * waiting + exchange / volumes.inner_steps) / (len(own) + 1)


def _difference(
    me: PeerId, own: Sequence[PeerId], others: Sequence[PeerId], links: LinkTable, nbytes: int
) -> float:
    """The difference of mean seconds to the others: mine less those of the stage's replicas."""
    mine = links.mean_seconds([me], others, nbytes)
    theirs = links.mean_seconds(own, others, nbytes)
    return 0.0 if mine is None or theirs is None else mine - theirs


class Abilities:
    """The stages that this machine can serve, by memory, disk, and text for the first one; and would move to."""

    def __init__(
        self, config: NodeConfig, manifest: Manifest, state: StateDirectory | None, data: DataSupply
    ) -> None:
        self._config = config
        self._manifest = manifest
        self._state = state
        self._data = data
        self._device = torch.device(config.device)
        self._on_host = shares_memory(self._device)
        # with a stage of the volunteer's choice it stays there; the baseline DiLoCo has a fixed world
        moves = config.moves and config.stage < 0 and manifest.outer.averages_pairs
        has_text = bool(config.data) or manifest.data.source != LOCAL
        fitting = stages_that_fit(manifest, self._room(), config.recompute, self._on_host)
        self.serveable = {stage for stage in fitting if stage or has_text}  # of which a newcomer takes one
        self.may_serve = set(self.serveable) if moves else set[int]()

    def _room(self, freed: int = 0) -> Room:
        room = room_on(self._device, self._config.most_memory)
        return Room(room.free + freed, room.limit, room.source)

    def require(self, stage: int, freed: int = 0, leaving: int | None = None) -> None:
        """Check that the stage fits, `freed` bytes of memory being given back before. Raises `UserError` if not.

        A checkpoint of the stage that this node is `leaving` stays on the disk.
        """
        require_memory(self._manifest, stage, self._room(freed), self._config.recompute, self._on_host)
        if not self._on_host:
            require_host_memory(self._manifest, stage, host_room())
        if self._state is not None:
            here = nbytes_by_stage(self._state.path)
            beside = 0 if leaving is None else self._still_to_take(leaving, here)
            if self._config.keep:
                copied = nbytes_by_stage(self._state.path / COPIES)
                beside += sum(self._still_to_take(other, copied) for other in range(self._manifest.stages))
            require_disk(self._manifest, stage, self._state.path, here=here.get(stage, 0), beside=beside)
        if stage == 0:
            self._data.require()

    def _still_to_take(self, stage: int, here: Mapping[int, int]) -> int:
        """Bytes that a checkpoint of the stage is still to take, with those on the disk by stage."""
        return max(0, nbytes_of_checkpoint(self._manifest, stage) - here.get(stage, 0))

    def check_move(self, source: int, target: int) -> None:
        """Check that `target` can replace `source`. Raises `UserError` if not: others are asked from then on."""
        try:
            self.require(target, freed=memory_of_state(self._manifest, source), leaving=source)
        except UserError:
            self.may_serve.discard(target)
            raise
