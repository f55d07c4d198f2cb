"""Holds what stays of a node from stage to stage, and what it is given at its start."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from node.config import NodeConfig
from node.giving.ledger import ContributionLedger
from node.membership.data_source import DataSupply, ReadData, RunTokenizer
from node.membership.membership import Membership
from node.membership.moving import OwnersPlan
from node.membership.stage_choice import Abilities
from node.membership.view import View
from node.membership.ways_in import WaysIn
from node.model.compute import Compute
from node.model.replica import Replica
from node.service.telling import Teller
from node.state.copies import CopyService
from node.storage.state_directory import StateDirectory
from node.watch.events import Events
from node.watch.history import Thinned
from node.watch.trace import NO_TRACE, Trace
from protocol.messages.peers import MOST_HISTORY, HistoryPoint
from protocol.rpc.rpc import Rpc
from protocol.run.manifest import Manifest
from protocol.run.signed_manifest import SignedManifest
from protocol.supervision import Supervisor
from protocol.transport.base import Transport
from protocol.windows import short, window

logger = logging.getLogger(__name__)

HISTORY_SECONDS = 10.0  # between two points of it, at first
CLOSING_SECONDS = 20.0  # what one step of ending may take before it is cut short
LAST_SECONDS = 0.5  # what each has when the time of whoever asked the node to leave is over


@dataclass(frozen=True)
class Surroundings:
    """Everything that differs between a real node and a simulated one."""

    transport: Transport
    compute: Callable[[int], Compute]  # of a stage
    events: Events
    rng: random.Random
    state: StateDirectory | None = None
    corpus: ReadData | None = None
    replica: Callable[[Manifest, int, str], Replica] = Replica
    rpc: type[Rpc] = Rpc
    trace: Trace = NO_TRACE
    teller: Teller | None = None  # to people, about this node
    makes_dry_run: bool = False  # a dry step tells how much memory there is for what


@dataclass
class NodeResources:
    """The parts of a node that stay when it moves from one stage to another."""

    config: NodeConfig
    surroundings: Surroundings
    rpc: Rpc
    supervisor: Supervisor
    contributions: ContributionLedger = field(default_factory=ContributionLedger)
    history: Thinned[HistoryPoint] = field(default_factory=lambda: Thinned(MOST_HISTORY, HISTORY_SECONDS))
    since: float = 0.0  # when it joined, by the loop's clock
    leave_by: float | None = None  # loop time at which leaving is to be over, once that has begun
    membership: Membership = field(init=False)  # from entering the run on
    plan: OwnersPlan = field(init=False)  # of who serves which stage
    ways: WaysIn | None = None  # in to this node; None where it looks for none
    copies: CopyService = field(init=False)  # of stages, on this node's disk
    abilities: Abilities = field(init=False)
    tokenizer: RunTokenizer = field(init=False)
    data: DataSupply = field(init=False)

    @window
    def __repr__(self) -> str:
        run = repr(self.membership) if self.has_entered else "not entered yet"
        return f"Peer: {short(self.transport.peer_id)} | Run: {run}"

    @property
    def transport(self) -> Transport:
        return self.surroundings.transport

    @property
    def events(self) -> Events:
        return self.surroundings.events

    @property
    def has_entered(self) -> bool:
        """Return whether this node has found and entered its run, so that there is a membership."""
        return hasattr(self, "membership")

    @property
    def signed(self) -> SignedManifest:
        return self.membership.signed

    @property
    def view(self) -> View:
        return self.membership.view

    def time_given(self, *, is_first_stage: bool) -> float:
        """Seconds left of those that the volunteer gave, which begin with training; 0 is no limit."""
        most = self.config.max_minutes * 60
        if is_first_stage or not most:
            return most
        return max(1e-3, most - (asyncio.get_running_loop().time() - self.since))

    def time_to_end(self) -> float:
        """Seconds that the next step of ending may take."""
        if self.leave_by is None:
            return CLOSING_SECONDS
        return max(LAST_SECONDS, self.leave_by - asyncio.get_running_loop().time())

    def random(self) -> random.Random:
        """A generator of its own for another part."""
        return random.Random(self.surroundings.rng.getrandbits(64))


async def attempt(
    action: Callable[[], Awaitable[None]], doing: str, seconds: float = CLOSING_SECONDS
) -> None:
    """Take one step of ending: what comes after it is done whatever becomes of it; the reason is told."""
    try:
        async with asyncio.timeout(seconds):
            await action()
    except Exception as error:  # noqa: BLE001  leaving goes on
        logger.warning("A problem while %s: %s", doing, str(error) or type(error).__name__)
