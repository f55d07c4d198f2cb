"""What the search for a partner hears (events) and what it asks to be done (actions). Plain data, compared by value.

A driver turns messages, timers and the replica's own progress into events, gives them to `PartnerSearch.handle`, and
carries out the actions that it returns, in their order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from node.membership.ledger import Shares
from node.rounds.meeting import Meeting, Pair, Proposal, Refusal
from protocol.ground import PeerId


class Lane(Enum):
    """The purpose of a proposal: at most one of each awaits its answer."""

    FIRST = auto()  # to find a partner
    BESIDE = auto()  # the same, in a large stage, while the first one awaits its answer
    RENEWAL = auto()  # to learn whether the partner still holds to the pair


@dataclass(frozen=True)
class Asker:
    """What the driver knows of a replica that proposes. A driver that cannot know a fact leaves it out."""

    serves_other_stage: bool = False
    is_quarantined: bool = False  # its contributions were out of all proportion
    has_other_version: bool = False
    has_other_lineage: bool = False
    must_wait: bool = False  # this replica may have to download its stage before it averages with that one
    shares: Shares | None = None  # of all that serve the stage; None to let any network average at any time


# --- events: the replica itself ---------------------------------------------------------------------


@dataclass(frozen=True)
class StepsCounted:
    """The replica has done this many inner steps of its round. Sent before other events whenever it has changed."""

    steps: int


@dataclass(frozen=True)
class StepDone:
    """An inner step of this length has ended. `StepJudged` follows."""

    seconds: float


@dataclass(frozen=True)
class StepJudged:
    """The driver has judged the replica after its step."""

    is_behind: bool = False  # it should download its stage before it averages
    in_doubt: bool = False  # there are signs that the partner is gone
    round_trip: float = 0.0  # seconds that an answer takes, as far as is known


@dataclass(frozen=True)
class RoundEnded:
    """The inner steps of the round are over."""


@dataclass(frozen=True)
class RoundBegan:
    """The next round begins, of nominally this many inner steps."""

    inner_steps: int


@dataclass(frozen=True)
class LastSearchBegan:
    """The replica trains no more and wants a partner for a round at once. `LastSearchEnded` follows."""


@dataclass(frozen=True)
class LastSearchStopped:
    """The replica waits for that partner no longer."""


@dataclass(frozen=True)
class PairsDropped:
    """The replica keeps none of its agreements, but goes on looking for partners."""


@dataclass(frozen=True)
class Retired:
    """The replica averages with nobody any more."""


@dataclass(frozen=True)
class TimerFired:
    """The time of the last `SetTimer` has come."""


@dataclass(frozen=True)
class Looked:
    """The reply to `LookAround`, given at once."""

    lane: Lane
    willing: Sequence[PeerId]  # replicas that serve the stage and may be averaged with
    shares: Shares  # of all that serve the stage
    round_trip: float = 0.0
    through_others: Collection[
        PeerId
    ] = ()  # of the willing: a third peer has to pass on what is sent to them


# --- events: replies of others ----------------------------------------------------------------------


@dataclass(frozen=True)
class ProposalAnswered:
    proposal: Proposal
    answer: Meeting | Refusal


@dataclass(frozen=True)
class ProposalLost:
    """No answer came within its deadline. The other may have agreed all the same."""

    proposal: Proposal


@dataclass(frozen=True)
class RecordArrived:
    """The record that `AskForRecord` asked for has come, or will not come."""

    proposal: Proposal


@dataclass(frozen=True)
class ReadyAnswered:
    pair: Pair
    is_known: bool  # False if the partner knows of no such pair


# --- events: requests of others ---------------------------------------------------------------------


@dataclass(frozen=True)
class Proposed:
    """Another replica proposes a pair, or asks whether it still holds. A `Reply` follows."""

    pair: Pair
    theirs: Meeting
    asker: Asker = Asker()


@dataclass(frozen=True)
class PartnerReady:
    """A partner reports that its round is about to end. A `Reply` follows."""

    pair: Pair


@dataclass(frozen=True)
class PartnerReleased:
    """A partner gives the pair up."""

    pair: Pair


@dataclass(frozen=True)
class AskedToSitOut:
    """Another replica asks this one to be left over in its turn. A `Reply` follows."""

    theirs: Meeting
    serves_other_stage: bool = False


Event: TypeAlias = (
    StepsCounted
    | StepDone
    | StepJudged
    | RoundEnded
    | RoundBegan
    | LastSearchBegan
    | LastSearchStopped
    | PairsDropped
    | Retired
    | TimerFired
    | Looked
    | ProposalAnswered
    | ProposalLost
    | RecordArrived
    | ReadyAnswered
    | Proposed
    | PartnerReady
    | PartnerReleased
    | AskedToSitOut
)


# --- actions ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LookAround:
    """Report who may be asked: `Looked`. Always the last action of a list."""

    lane: Lane


@dataclass(frozen=True)
class SendProposal:
    """Propose; `ProposalAnswered` or `ProposalLost` follows."""

    proposal: Proposal


@dataclass(frozen=True)
class AskForRecord:
    """Ask the replica that refused the proposal for the record of the one it named; `RecordArrived` follows.

    Always the last action of a list.
    """

    proposal: Proposal
    named: PeerId


@dataclass(frozen=True)
class SendReady:
    """Report to the partner that the round is about to end; `ReadyAnswered` may follow."""

    pair: Pair


@dataclass(frozen=True)
class SendRelease:
    """Give the pair up at its other replica."""

    pair: Pair


@dataclass(frozen=True)
class SendSitOut:
    """Ask a replica to be left over in the round that ends at `meeting`."""

    peer: PeerId
    meeting: Meeting


@dataclass(frozen=True)
class SetTimer:
    """Send `TimerFired` in this many seconds, in place of an earlier timer."""

    seconds: float


@dataclass(frozen=True)
class StopTimer:
    """Send no `TimerFired`."""


@dataclass(frozen=True)
class Suspect:
    """Leave the peer alone for a while: it did not answer."""

    peer: PeerId


@dataclass(frozen=True)
class Agreed:
    """This pair ends the present round: reported once for each."""

    pair: Pair


@dataclass(frozen=True)
class Reply:
    """Answer the request of the event; None for a plain yes."""

    answer: Meeting | Refusal | None = None


@dataclass(frozen=True)
class LastSearchEnded:
    """There is a partner for the last round or the next, which knows of it; or there will be none."""


Action: TypeAlias = (
    LookAround
    | SendProposal
    | AskForRecord
    | SendReady
    | SendRelease
    | SendSitOut
    | SetTimer
    | StopTimer
    | Suspect
    | Agreed
    | Reply
    | LastSearchEnded
)
