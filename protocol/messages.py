"""The requests and replies that peers exchange, with the bounds that each field must keep.

Tensors travel beside a message, not in it (see `protocol.frames`). A field that is missing, unknown or out of
bounds is a `WireError` at the reader, before anything is done.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.errors import WireError
from protocol.link_report import ToldLinks

Number = Annotated[float, Field(allow_inf_nan=False)]
Natural = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]
Id = Annotated[str, Field(min_length=1, max_length=64)]
OptionalId = Annotated[str, Field(max_length=64)]
ShortText = Annotated[str, Field(max_length=256)]
MAX_PROBE_BYTES = 256 * 1024  # a tenth of a second at 20 Mbit/s
MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
TOKENIZER_PIECE_BYTES = 128 * 1024
MOST_TOLD_PEERS = 256  # of each count by peer in `NodeStats`: some 15 kB, where a frame's header has 256 KiB
Tally = Annotated[dict[Id, Natural], Field(max_length=MOST_TOLD_PEERS)]
Part = Literal["z", "phi", "progress"]  # of a contribution to a round


class Message(BaseModel):
    """Base of all messages. `kind` is its name on the wire; `traffic` the stream that it travels on."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: ClassVar[str]


# --- getting to know each other -----------------------------------------------------------------


class Hello(Message):
    """First request on joining. The reply tells the run and, by its clock, whether ours is right.

    A `port` asks to be dialled at that port of the machine that the greeting comes from; 0 asks nothing.
    """

    kind: ClassVar[str] = "hello"
    port: Annotated[int, Field(ge=0, le=65_535)] = 0


class Welcome(Message):
    kind: ClassVar[str] = "welcome"
    run_id: Id
    time: Number  # wall clock of the replying peer, seconds since the epoch
    role: Literal["seed", "node"]
    manifest: Annotated[bytes, Field(max_length=64 * 1024)]
    reached: ShortText = (
        ""  # the address at which the asker was dialled as it wished; empty when nobody was there
    )


class GetStats(Message):
    kind: ClassVar[str] = "get-stats"


class NodeStats(Message):
    """What a node tells of itself on request: the numbers of `noloco status` and of the summary."""

    kind: ClassVar[str] = "node-stats"
    stage: Natural
    state: ShortText
    step: Natural
    round: Natural
    loss: Number | None = None  # mean training loss of the last step; the last stage alone knows it
    tokens: Natural = 0  # trained on by this replica, also before it was started again
    tokens_per_second: Number = 0.0
    pair_averagings: Natural = 0
    partners: Tally = {}  # rounds shared with each partner; with the most frequent ones, if there are many
    partner: ShortText = ""  # of the last round; empty when it was alone
    spread: Number | None = None  # replica spread estimated from the last pair distances
    expected_spread: Number | None = None  # as the theory predicts it from the noise of the rounds
    gossip_bytes: Natural = 0  # sent for averaging
    delivered: Natural = 0  # microbatches sent to next-stage peers, all of them
    sent: Tally = {}  # to each one; to the most frequent ones, if there are many
    received: Natural = 0  # microbatches admitted here
    queue: Natural = 0  # microbatches that waited for a place when the last step ended
    seconds_per_microbatch: Number | None = (
        None  # of computing here, forward and backward; None: not known yet
    )
    resends: Natural = 0
    blocked_seconds: Number = 0.0  # in which a round's exchange kept the replica from training
    uptime: Number = 0.0
    compute_fraction: Fraction | None = None  # of the time since the start, in training work; None: not told
    recent_compute_fraction: Fraction | None = None  # of the last minute
    data_wait_fraction: Fraction | None = None  # of the time in which stage 0 trained, waiting for data
    links: ToldLinks = []  # to the peers that were measured
    probe_breaches: Natural = 0  # probes refused because there were too many, and answers that were nonsense


# --- links --------------------------------------------------------------------------------------


class Probe(Message):
    """Measure the link: answered by `Probed` at once, without the compute thread. May be repeated, but not often.

    Without a tensor, on the control stream, it tells the round trip; with one of up to `MAX_PROBE_BYTES`, on the
    state stream, the bandwidth. Deadlines are the sender's. A failure leaves nothing behind on either side.
    Refusals: "too-often" (counts as a breach), "unknown-request" (an earlier version).
    """

    kind: ClassVar[str] = "probe"
    nonce: Annotated[bytes, Field(min_length=8, max_length=8)]


class Probed(Message):
    """Everything arrived. The digest cannot be known before, so no answer makes a link look faster than it is."""

    kind: ClassVar[str] = "probed"
    digest: Annotated[bytes, Field(min_length=16, max_length=16)]  # BLAKE2b over the nonce and the payload


# --- microbatches -------------------------------------------------------------------------------


class Progress(Message):
    """How far a request of the pipeline is, told every second or two until it is answered.

    Silence then means that the peer is frozen or gone, and slow work is waited for. Not a request: it travels in a
    frame of its own type.
    """

    kind: ClassVar[str] = "progress"
    state: Literal["receiving", "queued", "computing", "onward"]  # onward: it waits for a later stage
    ahead: Natural = 0  # microbatches before it in the queue there
    done: Natural = 0  # grows whenever the request gets on, at a later stage too


class Forward(Message):
    """Carry a microbatch onward. Tensors: activations [sequences, tokens, hidden], labels [sequences, tokens].

    Answered by `Gradient`. A repeated delivery of the same id gets the first delivery's answer.
    Refusals: "busy" (queue full), "not-serving", "non-finite", "bad-shape".
    """

    kind: ClassVar[str] = "forward"
    microbatch: Id
    stage: Natural  # of the receiver, as the sender believes
    # in a ring, and sent in no other run: the peer that drew the sequences, and the name that it gave them
    home: Annotated[str, Field(max_length=64, exclude_if=lambda home: not home)] = ""
    draw: Annotated[str, Field(max_length=64, exclude_if=lambda draw: not draw)] = ""


class Return(Message):
    """In a ring: bring the last stage's activations to the peer that drew the sequences, for the head and the loss.

    Tensors and answer as of `Forward`. Another replica of the first stage answers, too, but learns nothing from it: a
    microbatch whose home cannot be reached is of use to the stages between. Refusals: as of `Forward`, but "busy".
    """

    kind: ClassVar[str] = "return"
    microbatch: Id
    home: OptionalId
    draw: OptionalId


class Gradient(Message):
    """Tensors: the gradient of the mean loss by the activations that were sent, same shape."""

    kind: ClassVar[str] = "gradient"
    loss: Number
    queue: Natural  # microbatches waiting at the answering peer
    step: Natural  # inner steps it has done
    seconds: Number  # between admission and this answer, waiting for later stages included


class Evaluate(Message):
    """Forward only, with the slow weights φ. Tensors: tokens (stage 0) or activations, and labels.

    Answered by `Evaluated`. `route` names the peers of the stages behind the receiver. In a ring it ends with one of
    the first stage, which finds itself asked for the stage after the last one.
    """

    kind: ClassVar[str] = "evaluate"
    stage: Natural
    route: Annotated[list[Id], Field(max_length=1_024)]


class Evaluated(Message):
    kind: ClassVar[str] = "evaluated"
    loss_sum: Number  # nats, summed over tokens
    tokens: Natural


class Predict(Message):
    """What comes after a text, by the slow weights φ. Tensor: tokens [1, n] (stage 0) or activations [1, n, hidden].

    Answered by `Predicted`. `position` tokens of the same `answer` went this way before: their keys and values may
    still be held, and then one more token, n = 1, is enough. 0 begins anew with all tokens, and is always possible.
    Refusals: "forgotten" (begin anew: other weights, too long ago, no room), "not-serving", "bad-shape",
    "non-finite".
    A failure leaves keys and values behind, for a minute at most.
    """

    kind: ClassVar[str] = "predict"
    stage: Natural
    route: Annotated[list[Id], Field(max_length=1_024)]
    answer: Id
    position: Natural
    top: Natural  # how many of the largest logits are asked for; 0: all


class Predicted(Message):
    """Tensors: the logits after the last token [k] and the tokens that they are of [k], or all logits [vocabulary].

    `rounds` are those of the weights that computed them, of each stage from the receiver on.
    """

    kind: ClassVar[str] = "predicted"
    rounds: Annotated[list[Natural], Field(max_length=1_024)]


# --- rounds -------------------------------------------------------------------------------------


class Timed(Message):
    """When the sender's round may end, in seconds from now: the first, the nominal and the last end of a step."""

    opens_in: Seconds
    due_in: Seconds
    ends_in: Seconds
    step_seconds: Seconds  # that an inner step of the sender takes


class Propose(Timed):
    """Ask a replica of the same stage to be the partner of a round. May be repeated, also to see whether it holds.

    Answered by `Accept`, or refused: "engaged" (has a partner, whom the reason names), "busy" (has just proposed
    to somebody), "out-of-step" (the rounds cannot end together), "early" (cannot say yet), "other-stage", "finished".
    After a refusal or a failure there is no such pair.
    """

    kind: ClassVar[str] = "propose"
    stage: Natural
    round: Natural
    pair: Id  # names this exchange


class Accept(Timed):
    """The round that is meant is the one that goes on or the one after it, whichever can end with the proposer's."""

    kind: ClassVar[str] = "accept"
    round: Natural


class Ready(Message):
    """My round ends: end yours at the next inner step that allows it. May be repeated. Refusal: "unknown-pair"."""

    kind: ClassVar[str] = "ready"
    pair: Id


class Release(Message):
    """The pair is none any more, as far as I am concerned: find another partner. Answered by `Done`, always."""

    kind: ClassVar[str] = "release"
    pair: Id


class SitOut(Timed):
    """An odd number of us look for partners: be the one left over in the round that ends with my next one.

    The replica left over in a round asks this of a random other, so that not the slow ones are always left over.
    Refusal: "engaged" (has a partner for that round, or was alone before it).
    """

    kind: ClassVar[str] = "sit-out"
    stage: Natural


class Contribute(Message):
    """A piece of one part of a contribution, flat, from `offset`. Both partners send theirs at once.

    A run's contributions travel either as z = γ·φ + β·Δ, or as φ, which may come long before, and Δ. The piece
    of z at offset 0 also carries every n-th entry of φ for the distance estimate. A repeated piece is harmless;
    one without tensors, at the end, only asks whether the pair still holds.
    Refusals: "unknown-pair" (not, or no longer), "malformed" (another shape, NaN or infinity).
    """

    kind: ClassVar[str] = "contribute"
    pair: Id
    part: Part
    offset: Natural
    total: Natural


class Assemble(Message):
    """DiLoCo: the sender's round ends; answered `RollCall` when the other replicas' have, or after a deadline.

    Refusals: "alone" (no other replica came in time), "group" (others call the roll, or the sender is unknown).
    """

    kind: ClassVar[str] = "assemble"


class RollCall(Message):
    """Who averages with whom, the same for all of them; `name` is that all-reduce's."""

    kind: ClassVar[str] = "roll-call"
    name: Id
    members: Annotated[list[Id], Field(max_length=4096)]


class Reduce(Message):
    """DiLoCo: a part of z, flat, from `offset`; the receiver answers `Reduced` once all members gave theirs.

    Refusals: "late" (the others' parts are averaged already), "alone" (no other member came in time), "bad-shape",
    "given-up", "group".
    """

    kind: ClassVar[str] = "reduce"
    offset: Natural
    total: Natural
    name: Id


class Reduced(Message):
    """Tensors: the mean over so many members, [entries of the part]."""

    kind: ClassVar[str] = "reduced"
    members: Natural


class Done(Message):
    """A plain acknowledgement."""

    kind: ClassVar[str] = "done"


# --- state for late joiners and export ----------------------------------------------------------


class GetStateIndex(Message):
    kind: ClassVar[str] = "get-state-index"


class StateIndex(Message):
    kind: ClassVar[str] = "state-index"
    stage: Natural
    step: Natural
    round: Natural
    parameters: Natural
    piece_parameters: Annotated[int, Field(ge=1, le=2**26)]


class GetStatePiece(Message):
    """A range of the flat state. `moments` asks for δ and AdamW's moments beside φ.

    Refusal: "other-stage". Peers move, and the states of two stages may have the same shape.
    """

    kind: ClassVar[str] = "get-state-piece"
    stage: Natural
    index: Natural
    moments: bool


class StatePiece(Message):
    """Tensors, each [entries of this piece]: φ, and with moments δ, first and second moment of AdamW."""

    kind: ClassVar[str] = "state-piece"
    index: Natural
    step: Natural
    round: Natural
    digest: Annotated[bytes, Field(min_length=32, max_length=32)]  # SHA-256 over the tensors' bytes


# --- the run's tokenizer -------------------------------------------------------------------------


class GetTokenizer(Message):
    """A piece of the run's tokenizer.json, from byte `offset` on. May be repeated.

    Refusal: "no-tokenizer" (not here, not yet, or nothing from there on). The manifest has the hash of the whole.
    """

    kind: ClassVar[str] = "get-tokenizer"
    offset: Annotated[int, Field(ge=0, lt=MAX_TOKENIZER_BYTES)]


class TokenizerPiece(Message):
    """`TOKENIZER_PIECE_BYTES` of it, fewer at the end."""

    kind: ClassVar[str] = "tokenizer-piece"
    total: Annotated[int, Field(ge=1, le=MAX_TOKENIZER_BYTES)]
    contents: Annotated[bytes, Field(max_length=TOKENIZER_PIECE_BYTES)]


MESSAGES: dict[str, type[Message]] = {
    message.kind: message
    for message in (
        Hello, Welcome, GetStats, NodeStats, Progress, Forward, Return, Gradient, Evaluate, Evaluated, Predict,
        Predicted, Propose, Accept, Ready, Release, SitOut, Contribute, Assemble, RollCall, Reduce, Reduced,
        Done, GetStateIndex, StateIndex, GetStatePiece, StatePiece, Probe, Probed, GetTokenizer, TokenizerPiece,
    )
}  # fmt: skip


def parse_message(kind: object, body: Any) -> Message:
    """Validate an untrusted message. Raises `WireError` that names the kind and the first bad field."""
    message_type = MESSAGES.get(kind) if isinstance(kind, str) else None
    if message_type is None:
        raise WireError(f"unknown kind of message: {str(kind)[:40]!r}")
    try:
        return message_type.model_validate(body, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise WireError(f"malformed {kind}: {place}: {first['msg']}") from None
