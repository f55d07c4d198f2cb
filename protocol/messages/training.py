"""Messages of replicas while they train: microbatches through the pipeline, and rounds of averaging."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from protocol.codecs.codec import Encoded
from protocol.errors import WireError
from protocol.ground import MOST_LOSS, Count, Natural
from protocol.messages import (
    Asker,
    Asks,
    Done,
    Id,
    Loss,
    Message,
    OptionalId,
    Seconds,
    Traffic,
)
from protocol.messages.layouts import EXACT, TOKENS, Layout, like_the_first
from protocol.records.identity import OptionalPeerId, PeerIdText

MOST_TOKENS = 2**31  # of one request
Part = Literal["z", "phi", "progress", "sample"]  # of a contribution to a round

# --- microbatches -------------------------------------------------------------------------------


class Gradient(Message, kind="gradient"):
    """Tensors: the gradient of the mean loss by the activations that were sent, same shape."""

    loss: Loss
    queue: Count  # microbatches waiting at the answering peer
    step: Count  # inner steps it has done
    seconds: Seconds  # between admission and this answer, waiting for later stages included


class Forward(Asks[Gradient], kind="forward", traffic=Traffic.PIPELINE, asker=Asker.BEFORE):
    """Carry a microbatch onward. Tensors: activations [sequences, tokens, hidden], labels [sequences, tokens].

    Answered by `Gradient`. A repeated delivery of the same id gets the first delivery's answer.
    Refusals: "busy" (queue full), "not-serving", "non-finite", "bad-shape".
    """

    microbatch: Id
    stage: Natural  # of the receiver, as the sender believes
    # in a ring, and sent in no other run: the peer that drew the sequences, and the name that it gave them
    home: OptionalPeerId = ""
    draw: OptionalId = ""
    step: Natural = 0  # of the replica that drew it, where `inner.clock` is "run"

    def layouts(self, sent: Sequence[Encoded]) -> Sequence[Layout]:
        return like_the_first(sent)


class Backlog(Message, kind="backlog"):
    seconds: Seconds  # that the device needs for the microbatches which are at the answering peer already


class GetBacklog(Asks[Backlog], kind="get-backlog", traffic=Traffic.CONTROL, asker=Asker.BEFORE):
    """Asks how long a microbatch would wait now, to choose between two replicas. Refusals: those of `Forward`."""

    stage: Natural  # of the receiver, as the sender believes


class Return(Asks[Gradient], kind="return", traffic=Traffic.PIPELINE, asker=Asker.BEFORE):
    """Bring the last stage's activations, in a ring, to the peer that drew the sequences, for the head and the loss.

    Tensors and answer are those of `Forward`. Another replica of the first stage answers, too, but learns nothing
    from it: a microbatch whose home cannot be reached is of use to the stages between. Refusals: those of `Forward`,
    except "busy".
    """

    microbatch: Id
    home: OptionalPeerId
    draw: OptionalId

    def layouts(self, sent: Sequence[Encoded]) -> Sequence[Layout]:
        return like_the_first(sent)


class Evaluated(Message, kind="evaluated"):
    loss_sum: Annotated[
        float, Field(ge=0, le=MOST_LOSS * MOST_TOKENS, allow_inf_nan=False)
    ]  # nats, summed over tokens
    tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)]


class Evaluate(Asks[Evaluated], kind="evaluate", traffic=Traffic.PIPELINE, asker=Asker.ANYBODY):
    """Forward only, with the slow weights φ. Tensors: tokens (stage 0) or activations, and labels.

    Answered by `Evaluated`. `route` names the peers of the stages behind the receiver. In a ring it ends with one of
    the first stage, which finds itself asked for the stage after the last one.
    """

    stage: Natural
    route: Annotated[list[PeerIdText], Field(max_length=1_024)]

    def require_fit(self, answer: Message, sent: Sequence[Encoded]) -> None:
        """Refuse a loss over other tokens than the labels sent: in a mean it would count for all the others."""
        if not isinstance(answer, Evaluated) or len(sent) != 2:
            return
        if answer.tokens != math.prod(sent[1].shape):
            raise WireError("malformed evaluated: tokens: other than the labels sent")
        if answer.loss_sum > MOST_LOSS * answer.tokens:
            raise WireError("malformed evaluated: loss_sum: larger than any loss of so many tokens")


class Predicted(Message, kind="predicted"):
    """Tensors: the logits after the last token [k] and the tokens that they are of [k], or all logits [vocabulary].

    `rounds` are those of the weights that computed them, of each stage from the receiver on.
    """

    rounds: Annotated[list[Count], Field(max_length=1_024)]


class Predict(Asks[Predicted], kind="predict", traffic=Traffic.PIPELINE, asker=Asker.ANYBODY):
    """Predict what follows a text by the slow weights φ.

    Tensor: tokens [1, n] (stage 0) or activations [1, n, hidden]. Answered by `Predicted`.

    `position` tokens of the same `answer` went this way before: their keys and values may still be held, and then one
    more token, n = 1, is enough. 0 starts again with all tokens; that is always possible.
    Refusals: "forgotten" (start again: other weights, too long ago, no room), "not-serving", "bad-shape",
    "non-finite".
    A failure leaves keys and values behind, for a minute at most.
    """

    stage: Natural
    route: Annotated[list[PeerIdText], Field(max_length=1_024)]
    answer: Id
    position: Natural
    top: Natural  # how many of the largest logits are asked for; 0: all

    def layouts(self, sent: Sequence[Encoded]) -> Sequence[Layout]:
        """The logits, and with fewer than all of them their tokens."""
        return [Layout((None,), EXACT), *([Layout((None,), TOKENS, may_lack=True)] if self.top else ())]


# --- rounds -------------------------------------------------------------------------------------


class Timed(Message):
    """The times, in seconds from now, at which the sender's round may end: first, nominal and last end of a step."""

    opens_in: Seconds
    due_in: Seconds
    ends_in: Seconds
    step_seconds: Seconds  # that an inner step of the sender takes


class Accept(Timed, kind="accept"):
    """The round that is meant is the one that goes on or the one after it, whichever can end with the proposer's."""

    round: Count


class Propose(Timed, Asks[Accept], kind="propose", traffic=Traffic.PAIRING, asker=Asker.REPLICA):
    """Ask a replica of the same stage to be the partner of a round. May be repeated, also to see whether it holds.

    Answered by `Accept`, or refused: "engaged" (has a partner, whom the reason names), "busy" (has just proposed
    to somebody), "out-of-step" (the rounds cannot end together), "early" (cannot say yet),
    "other-stage", "other-lineage", "other-version", "finished".
    After a refusal or a failure there is no such pair.
    """

    stage: Natural
    round: Count
    pair: Id  # names this exchange
    beginning: Natural = 0  # of the sender's lineage, see `protocol.records.lineage`


class Ready(Asks[Done], kind="ready", traffic=Traffic.PAIRING, asker=Asker.REPLICA):
    """Says that the sender's round ends: end yours at the next inner step that allows it. May be repeated.

    Refusal: "unknown-pair".
    """

    pair: Id


class Release(Asks[Done], kind="release", traffic=Traffic.PAIRING, asker=Asker.REPLICA):
    """Says that the two are no longer a pair for the sender: find another partner. Always answered by `Done`."""

    pair: Id


class SitOut(Timed, Asks[Done], kind="sit-out", traffic=Traffic.PAIRING, asker=Asker.REPLICA):
    """Asks to be left over, as an odd number look for partners, in the round that ends with the sender's next one.

    The replica left over in a round asks this of a random other, so that not the slow ones are always left over.
    Refusal: "engaged" (has a partner for that round, or was alone before it).
    """

    stage: Natural


class Contribute(Asks[Done], kind="contribute", traffic=Traffic.GOSSIP, asker=Asker.REPLICA):
    """A piece of one part of a contribution, flat, from `offset`. Both partners send theirs at once.

    A run's contributions travel either as z = γ·φ + β·Δ, or as φ, which may come long before, and Δ. The piece
    of z at offset 0 also carries every n-th entry of φ for the distance estimate; modulo a few bits that "sample"
    comes long before, for z is sent by what it shows. A repeated piece is harmless;
    one without tensors, at the end, only asks whether the pair still holds.
    Refusals: "unknown-pair" (not, or no longer), "malformed" (another shape, NaN or infinity).
    """

    pair: Id
    part: Part
    offset: Natural
    total: Natural


class Unread(Asks[Done], kind="unread", traffic=Traffic.GOSSIP, asker=Asker.REPLICA):
    """Tells which blocks of the receiver's could not be read, where contributions travel modulo a few bits.

    Tensor: bits, int32 [⌈blocks/32⌉], block b in bit b mod 32 of entry b // 32. Sent once all of the receiver's
    contribution is there; what either of two partners could not read, both leave as it is. May be repeated.
    Refusals: "unknown-pair", "malformed".
    """

    pair: Id


class RollCall(Message, kind="roll-call"):
    """The members that average with each other, the same for all of them; `name` is that all-reduce's."""

    name: Id
    members: Annotated[list[PeerIdText], Field(max_length=4096)]


class Assemble(Asks[RollCall], kind="assemble", traffic=Traffic.GOSSIP, asker=Asker.REPLICA):
    """DiLoCo: the sender's round ends; answered `RollCall` when the other replicas' have, or after a deadline.

    Refusals: "alone" (no other replica came in time), "group" (others call the roll, or the sender is unknown).
    """


class Reduced(Message, kind="reduced"):
    """Tensors: the mean over so many members, [entries of the part]."""

    members: Count


class Reduce(Asks[Reduced], kind="reduce", traffic=Traffic.GOSSIP, asker=Asker.REPLICA):
    """DiLoCo: a part of z, flat, from `offset`; the receiver answers `Reduced` once all members gave theirs.

    Refusals: "late" (the others' parts are averaged already), "alone" (no other member came in time), "bad-shape",
    "given-up", "group".
    """

    offset: Natural
    total: Natural
    name: Id

    def layouts(self, sent: Sequence[Encoded]) -> Sequence[Layout]:
        return like_the_first(sent)
