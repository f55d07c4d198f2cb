"""Whose weights an export takes: one replica of each stage, or all of a stage that are at one round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bootstrap.inspect.observer import Observer
from node.state.transfer import INDEX_DEADLINE
from protocol.errors import JoinError, NolocoError
from protocol.messages import GetStateIndex, StateIndex
from protocol.rpc import Traffic
from protocol.supervision import all_of
from protocol.transport.base import PeerId


@dataclass(frozen=True)
class Donor:
    """A replica that offers its slow weights; `is_finished` when it does not train any more."""

    peer: PeerId
    step: int
    round: int
    is_finished: bool = False


@dataclass(frozen=True)
class Source:
    """Where one stage's weights come from; of several donors the mean. Sorted by peer id."""

    stage: int
    parameters: int
    donors: tuple[Donor, ...]

    @property
    def key(self) -> list[list[str | int]]:
        """What two fetches must have in common to be of the same weights."""
        return [[str(donor.peer), donor.round] for donor in self.donors]

    def __str__(self) -> str:
        if len(self.donors) == 1:
            return f"…{self.donors[0].peer[-8:]} at round {self.donors[0].round}"
        rounds = sorted({donor.round for donor in self.donors})
        at = f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}, the end"
        return f"{len(self.donors)} replicas at {at}"


def choose(donors: Sequence[Donor], mean: bool, earlier: Sequence[Sequence[str | int]] = ()) -> list[Donor]:
    """Which of them to take; those of an earlier, incomplete export where they are still at the same round.

    For a mean the largest group at one round, of equal ones the latest; replicas that have finished are one group.
    """
    known = {(str(donor.peer), donor.round): donor for donor in donors}
    again = [known.get((str(peer), int(round_))) for peer, round_ in earlier]
    kept = [donor for donor in again if donor is not None]
    groups: dict[tuple[bool, int], list[Donor]] = {}
    for donor in donors:
        groups.setdefault((donor.is_finished, -1 if donor.is_finished else donor.round), []).append(donor)
    if not mean:
        return kept if kept and len(kept) == len(again) == 1 else list(donors[:1])
    best = max(groups.items(), key=lambda item: (len(item[1]), item[0]))[1]
    return kept if len(kept) == len(again) >= len(best) else best


async def donors_of(observer: Observer, stage: int, parameters: int, peers: Sequence[PeerId]) -> list[Donor]:
    """Those of `peers` that answer and hold as many parameters as the manifest says, by peer id.

    Raises `JoinError` when nobody does, with what each of those asked failed with.
    """
    answers = await all_of(*(_index(observer, stage, parameters, peer) for peer in sorted(peers)))
    found = [answer for answer in answers if not isinstance(answer, str)]
    if not found and answers:
        raise JoinError(
            f"No replica of stage {stage} of {observer.manifest.stages} gives its weights:\n  "
            + "\n  ".join(str(answer) for answer in answers)
            + "\nTry again; started again with the same --out an export goes on where it stopped."
        )
    if not found:
        raise JoinError(
            f"No live peer serves stage {stage} of {observer.manifest.stages}. Wait until one has joined."
        )
    return found


async def _index(observer: Observer, stage: int, parameters: int, peer: PeerId) -> Donor | str:
    """The donor, or in words why it is none."""
    try:
        index, _ = await observer.rpc.call(
            peer, Traffic.STATE, GetStateIndex(), StateIndex, deadline=INDEX_DEADLINE
        )
    except NolocoError as failure:
        return f"…{peer[-8:]}: {failure}"
    if index.stage != stage:
        return f"…{peer[-8:]}: it has gone to stage {index.stage}"
    if index.parameters != parameters:
        return f"…{peer[-8:]}: it has {index.parameters} parameters where the manifest says {parameters}"
    return Donor(peer, index.step, index.round, observer.view.has_finished(peer))
