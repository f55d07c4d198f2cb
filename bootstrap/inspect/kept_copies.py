"""Copies of a stage that nobody serves, as a visitor finds them: of the peer of --join, and of those that had it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import torch

from bootstrap.inspect.observer import Observer
from node.links.links import Links
from node.membership.membership import Membership
from node.membership.others_past import ask_of_past
from node.membership.past import Past
from node.model.stage import parameter_count
from node.state.copies import OfferedCopy, StageCopies, fetch_copy_piece
from node.state.download import WantedState
from node.watch.events import Events
from protocol.errors import JoinError
from protocol.ground import PeerId
from protocol.messages.state import StageCopy
from protocol.supervision import Supervisor, all_of

MOST_LOOKED_AT = 16  # stages at once: each asks some twenty peers


@dataclass(frozen=True)
class KeptCopy:
    """A copy that one peer keeps of a stage."""

    peer: PeerId
    copy: StageCopy
    name: str  # of the peer, for people

    @property
    def saved(self) -> str:
        """When it was saved, for people: "2026-11-28 20:01 UTC"."""
        try:
            return f"{datetime.fromtimestamp(self.copy.saved, UTC):%Y-%m-%d %H:%M} UTC"
        except (ValueError, OverflowError, OSError):  # a stranger wrote it
            return "at an unknown time"

    def __str__(self) -> str:
        return f"the copy that {self.name} keeps, step {self.copy.step:,}, saved {self.saved}"

    async def slow_piece(self, observer: Observer, number: int) -> torch.Tensor:
        """Fetch φ of one piece, float32, checked as a newcomer checks it. Raises `JoinError` as `fetch_copy` does."""
        wanted = WantedState.of(observer.manifest, self.copy.stage, self.copy.parameters)
        phi, *_ = await fetch_copy_piece(observer.rpc, OfferedCopy(self.copy, (self.peer,)), wanted, number)
        return phi


async def find_copies(observer: Observer, stage: int, without: Collection[PeerId] = ()) -> list[KeptCopy]:
    """Return the copy to take of a stage, once for each peer that has it; empty where nobody offers one.

    It is chosen as a first replica chooses, by what peers remember of the stage's members. Deadline: `ASK_DEADLINE`,
    twice. Raises `JoinError` when copies are offered and none is borne out by the past.
    """
    manifest, transport = observer.manifest, observer.transport
    lifetime = manifest.limits.record_lifetime
    past = Past(observer.signed.run_id, manifest.most_steps, lifetime, transport.now)
    membership = Membership(
        observer.rpc, observer.signed, observer.view, Links(), Events(transport.now, lambda _: None), Supervisor(),
        past, observer.admission,
    )  # fmt: skip
    for member in observer.view.members(stage, transport.now()):
        past.note(member)
    await ask_of_past(membership, stage)
    wanted = WantedState.of(manifest, stage, parameter_count(manifest, stage))
    stage_copies = StageCopies(membership, wanted)
    answers = await stage_copies.offers(0)
    offers = {peer: copies for peer, copies in answers.items() if copies and peer not in without}
    if not offers:
        return []
    offer = stage_copies.chosen(offers)
    if offer is None:
        raise JoinError(_not_borne_out(stage, offers, observer.called([min(offers)]), bool(past.of(stage))))
    return [KeptCopy(p, _of_peer(offers[p], offer.copy), observer.called([p])) for p in offer.peers]


async def copies_of(observer: Observer, stages: Sequence[int]) -> dict[int, KeptCopy]:
    """Return a copy to take of each of these stages, where one is borne out. Deadline: that of `find_copies`."""

    async def find(stage: int) -> list[KeptCopy]:
        with suppress(JoinError):
            return await find_copies(observer, stage)
        return []

    found = await all_of(*map(find, stages[:MOST_LOOKED_AT]))
    return {kept[0].copy.stage: kept[0] for kept in found if kept}


def _of_peer(copies: Collection[StageCopy], chosen: StageCopy) -> StageCopy:
    """The peer's copy of that step: each was saved at its own time."""
    same = chosen.beginning, chosen.step, chosen.round
    return next(copy for copy in copies if (copy.beginning, copy.step, copy.round) == same)


def _not_borne_out(stage: int, offers: dict[PeerId, list[StageCopy]], name: str, has_past: bool) -> str:
    step = max(copy.step for copy in offers[min(offers)])
    why = (
        "what members recorded of the stage does not bear it out"
        if has_past
        else "no peer that answers remembers who had the stage"
    )
    return (
        f"Nobody serves stage {stage}. {name} offers a copy at step {step:,}, which is not taken: {why}. Name "
        "the seed peer, or a member that was there before, with --join, or try again once somebody serves the stage."
    )
