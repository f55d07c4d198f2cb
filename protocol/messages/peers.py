"""Messages of peers beside training: who they are, what they have done, how fast links are."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field

from protocol.access.revocations import MAX_REVOCATIONS_BYTES
from protocol.access.tokens import MAX_CREDENTIAL_BYTES
from protocol.access.words import MAX_SEALED_BYTES, MESSAGE_BYTES, PROOF_BYTES
from protocol.errors import legible
from protocol.ground import Count, Natural, Time
from protocol.messages import (
    Asker,
    Asks,
    Done,
    Fraction,
    Id,
    Message,
    ShortText,
    Traffic,
)
from protocol.records.announcement import MOST_LEVEL, Figure, ToldLinks
from protocol.records.forgiving import open_ended, otherwise
from protocol.records.identity import OptionalPeerId, PeerIdText
from protocol.records.receipts import Name, Receipt
from protocol.records.records import MAX_RECORD_BYTES

Sealed = Annotated[bytes, Field(max_length=MAX_REVOCATIONS_BYTES)]
MAX_PROBE_BYTES = 256 * 1024  # a tenth of a second at 20 Mbit/s
MOST_SHARED = 32  # records in one answer, of some 1 kB each
MOST_STAGES_ASKED = 256
MOST_RECEIPTS = 256  # in one answer: some 60 kB
MOST_TOLD_PEERS = 256  # of each count by peer in `NodeStats`: some 15 kB, where a frame's header has 256 KiB
MOST_HISTORY = 240  # points, some 15 kB
Size = Annotated[Figure, Field(ge=0)]
Tally = Annotated[dict[PeerIdText, Natural], Field(max_length=MOST_TOLD_PEERS)]

# --- getting to know each other -----------------------------------------------------------------


class Welcome(Message, kind="welcome"):
    run_id: Id
    time: Time  # wall clock of the replying peer, seconds since the epoch
    role: Annotated[Literal["seed", "node"], otherwise("node", "seed", "node")]
    manifest: Annotated[bytes, Field(max_length=64 * 1024)]
    reached: Annotated[ShortText, AfterValidator(lambda text: " ".join(legible(text).split()))] = (
        ""  # the address at which the asker was dialled as it wished; empty if nobody was there
    )
    revoked: Sealed = b""  # the last list of the run's owner, see `protocol.access.revocations`; empty: none


class Hello(Asks[Welcome], kind="hello", traffic=Traffic.CONTROL, asker=Asker.NEWCOMER):
    """First request on joining. The reply tells the run and, by its clock, whether ours is right.

    A `port` asks to be dialled at that port of the machine that the greeting comes from; 0 asks nothing. Of all
    requests this one alone may have fields that the reader does not know: it is sent before the two know each other.
    """

    model_config = ConfigDict(extra="ignore")
    port: Annotated[int, Field(ge=0, le=65_535)] = 0


class WayKept(Message, kind="way-kept"):
    seconds: Annotated[
        float, Field(gt=0, le=3_600, allow_inf_nan=False)
    ]  # for which it is kept, unless asked again


class KeepWay(Asks[WayKept], kind="keep-way", traffic=Traffic.CONTROL):
    """Asks the peer to pass streams on to the asker, which nobody can dial, for a while.

    The connection between the two must stay. May be repeated, and has to be. Refusal: "passes-nothing-on" (it is not
    willing, or does so for as many as it can).
    """


class Introduce(Asks[Done], kind="introduce", traffic=Traffic.CONTROL, asker=Asker.NEWCOMER):
    """Shows the sender's record to a peer that may not have found it in the DHT yet.

    Sent first on every stream, and after a refusal as "stranger". May be repeated. Refusal: "no-record" (not of this
    run, not signed by the sender, or over).

    Visitors of a private run, and newcomers to it, have no record and show their credential alone.
    """

    stage: Natural = 0
    level: Annotated[int, Field(ge=0, le=MOST_LEVEL)] = 0  # of the key that the record is sealed for
    record: Annotated[bytes, Field(max_length=MAX_RECORD_BYTES)] = b""  # as sealed for the DHT
    expires: Time  # wall clock
    credential: Annotated[bytes, Field(max_length=MAX_CREDENTIAL_BYTES)] = b""


class WordsTried(Message, kind="words-tried"):
    """The answer of a peer that has an invitation by words to give: its part of the exchange."""

    message: Annotated[bytes, Field(min_length=MESSAGE_BYTES, max_length=MESSAGE_BYTES)]


class TryWords(Asks[WordsTried], kind="try-words", traffic=Traffic.CONTROL, asker=Asker.NEWCOMER):
    """Begins an exchange by which a newcomer proves to know an invitation's words: `protocol.access.word_exchange`.

    May be repeated: the last one counts. Refusals: "words-none", "words-expired", "words-used", "words-ended" (too
    many wrong tries), "too-often".
    """

    message: Annotated[bytes, Field(min_length=MESSAGE_BYTES, max_length=MESSAGE_BYTES)]


class Invited(Message, kind="invited"):
    sealed: Annotated[bytes, Field(max_length=MAX_SEALED_BYTES)]  # the token, with the key of the exchange


class ProveWords(Asks[Invited], kind="prove-words", traffic=Traffic.CONTROL, asker=Asker.NEWCOMER):
    """Proves to know the words, after `TryWords` on the same peer; answered once. Not to be repeated.

    Refusals: those of `TryWords`, and "words-wrong", which counts as one of `MOST_TRIES`.
    """

    proof: Annotated[bytes, Field(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]


@open_ended
class SharedRecord(NamedTuple):
    """A member's record of a stage, as it was sealed for the DHT. Travels as an array."""

    peer: PeerIdText
    stage: Natural
    level: Annotated[int, Field(ge=0, le=MOST_LEVEL)]  # of the key that it is sealed for
    record: Annotated[bytes, Field(max_length=MAX_RECORD_BYTES)]
    expires: Time  # wall clock


class Records(Message, kind="records"):
    records: Annotated[list[SharedRecord], Field(max_length=MOST_SHARED)]


class GetRecords(Asks[Records], kind="get-records", traffic=Traffic.CONTROL, asker=Asker.ANYBODY):
    """Asks for some of the records that the peer knows of these stages, its own first.

    They are signed: nobody needs to be believed for them, and whoever sits on a key of the DHT hides nobody. The
    asker's `own` comes with the question.
    """

    own: Annotated[list[SharedRecord], Field(max_length=1)] = Field(default_factory=list)
    stages: Annotated[list[Natural], Field(min_length=1, max_length=MOST_STAGES_ASKED)]


class GetRecord(Asks[Records], kind="get-record", traffic=Traffic.CONTROL):
    """Asks for the record of one member that the peer has named, if it knows it still. May be repeated."""

    peer: PeerIdText


@open_ended
class PastRecord(NamedTuple):
    """A member's last record of a stage, as it was sealed for the DHT; it may be over. Travels as an array."""

    peer: PeerIdText
    stage: Natural
    level: Annotated[int, Field(ge=0, le=MOST_LEVEL)]
    record: Annotated[bytes, Field(max_length=MAX_RECORD_BYTES)]
    expires: Time  # wall clock
    first: Time  # wall clock at which the sender first read a record of that member and lineage


class PastRecords(Message, kind="past-records"):
    records: Annotated[list[PastRecord], Field(max_length=MOST_SHARED)]


class GetPast(Asks[PastRecords], kind="get-past", traffic=Traffic.CONTROL, asker=Asker.ANYBODY):
    """Asks who has served these stages, as the peer has read it itself in the last days. May be repeated.

    Refusal: "unknown-request" (an earlier version).
    """

    stages: Annotated[list[Natural], Field(min_length=1, max_length=MOST_STAGES_ASKED)]


class Revoked(Message, kind="revoked"):
    sealed: Sealed


class GetRevoked(Asks[Revoked], kind="get-revoked", traffic=Traffic.CONTROL):
    """Asks for the last list of revocations if later than the asker's, else empty. Asked of a few now and then."""

    issued: Time  # of the asker's list; 0 for none


@open_ended
class LossTrend(NamedTuple):
    """Mean losses `seconds` ago, an hour at most, and now. Travels as an array."""

    seconds: Size
    before: Figure
    now: Figure
    error: Size  # standard error of the difference


@open_ended
class LossBest(NamedTuple):
    """The lowest mean loss of some hundred steps in a row so far. Travels as an array."""

    loss: Figure
    time: Figure  # wall clock at which the last of those steps ended
    error: Size = 0.0  # standard error of the difference between it and `NodeStats.loss`


@open_ended
class Awaited(NamedTuple):
    """The replica whose return a first replica waits for, with the state that its stage had. Travels as an array."""

    stage: Natural
    step: Count  # that the stage was at
    peer: OptionalPeerId  # had it last; empty: not known
    seen: Figure  # wall clock at which that peer was there last
    until: Figure  # wall clock at which the wait ends


class NodeStats(Message, kind="node-stats"):
    """A node's figures, told on request: the numbers of `noloco status` and of the summary."""

    model_config = ConfigDict(
        frozen=True, extra="ignore"
    )  # a later version may say more, and is watched all the same
    stage: Natural
    state: ShortText
    step: Count
    round: Count
    loss: Figure | None = None  # mean training loss of its last 30 steps; the last stage alone knows it
    tokens: Natural = 0  # trained on by this replica, also before it was started again
    tokens_per_second: Figure = 0.0
    pair_averagings: Natural = 0
    # rounds shared with each partner; with the most frequent ones, if there are many
    partners: Tally = Field(default_factory=dict)
    partner: OptionalPeerId = ""  # of the last round; empty when it was alone
    spread: Figure | None = None  # replica spread estimated from the last pair distances
    expected_spread: Figure | None = None  # as the theory predicts it from the noise of the rounds
    gossip_bytes: Natural = 0  # sent for averaging
    delivered: Natural = 0  # microbatches sent to next-stage peers, all of them
    sent: Tally = Field(default_factory=dict)  # to each one; to the most frequent ones, if there are many
    received: Natural = 0  # microbatches admitted here
    queue: Natural = 0  # microbatches that waited for a place when the last step ended
    seconds_per_microbatch: Figure | None = None  # of computing here, forward and backward; None: not known
    resends: Natural = 0
    blocked_seconds: Figure = 0.0  # in which a round's exchange kept the replica from training
    uptime: Figure = 0.0
    compute_fraction: Fraction | None = None  # of the time since the start, in training work; None: not told
    recent_compute_fraction: Fraction | None = None  # of the last minute
    data_wait_fraction: Fraction | None = None  # of the time in which stage 0 trained, waiting for data
    links: ToldLinks = Field(default_factory=list)  # to the peers that were measured
    version: ShortText = ""  # of the program
    trend: LossTrend | None = None  # of the loss; the last stage alone knows it
    step_age: Size | None = None  # seconds since the last inner step ended here; None before the first
    no_peer_seconds: Size = 0.0  # for which a microbatch has waited here since nobody serves the next stage
    time: Figure | None = None  # its wall clock as it answers
    cannot_save: bool = False  # its last checkpoint could not be written
    passed_on: Natural = 0  # bytes, between peers that cannot dial each other
    probe_breaches: Natural = 0  # probes refused because there were too many, and answers that were nonsense
    device: ShortText = ""  # as its driver calls it, or "cpu"; empty: not told
    memory: Natural = 0  # bytes that the node takes of the device's
    memory_of_device: Natural = 0
    share_of_peak: Size | None = None  # of the device's published operations; None: nothing is known of it
    best: LossBest | None = None  # of this node's microbatches; None: too early, or an earlier version
    beginning: Natural = (
        0  # number of the beginning of the stage's lineage; 0 is the run's seed or checkpoint
    )
    begun: Figure | None = None  # wall clock at which this lineage was begun anew; None for number 0
    awaited: Awaited | None = None  # while it waits for a stage to return; None: it does not
    apart: Natural = 0  # replicas of its stage with which it cannot average: they are of another version


class GetStats(Asks[NodeStats], kind="get-stats", traffic=Traffic.CONTROL, asker=Asker.ANYBODY):
    """Asks a node for its numbers."""


# --- contributions --------------------------------------------------------------------------------


class ReceiptList(Message, kind="receipts"):
    receipts: Annotated[list[Receipt], Field(max_length=MOST_RECEIPTS)]


class SignReceipt(Asks[ReceiptList], kind="sign-receipt", traffic=Traffic.CONTROL):
    """Asks for one receipt: for all that the asker has done for the asked peer in this run, under this name.

    May be repeated. Refusal: "nothing-had".
    """

    name: Name = ""


class GetReceipts(Asks[ReceiptList], kind="get-receipts", traffic=Traffic.CONTROL, asker=Asker.ANYBODY):
    """Asks a node for the largest receipts that it has of others, and for its own for others. May be repeated."""


# --- history --------------------------------------------------------------------------------------


@open_ended
class HistoryPoint(NamedTuple):
    """A node's figures at some time. Travels as an array."""

    time: Figure  # its wall clock
    stage: Natural
    tokens: Natural
    tokens_per_second: Size
    loss: Figure | None
    spread: Figure | None
    expected_spread: Figure | None


class History(Message, kind="history"):
    """A node's history, oldest first; evenly spaced over the life of the node that tells it."""

    points: Annotated[list[HistoryPoint], Field(max_length=MOST_HISTORY)]


class GetHistory(Asks[History], kind="get-history", traffic=Traffic.CONTROL, asker=Asker.ANYBODY):
    """Asks a node how it went until now, for whoever begins to watch.

    Refusal: "unknown-request" (an earlier version).
    """


# --- links --------------------------------------------------------------------------------------


class Probed(Message, kind="probed"):
    """Says that all arrived. The digest cannot be known before, so no answer makes a link look faster than it is."""

    digest: Annotated[bytes, Field(min_length=16, max_length=16)]  # BLAKE2b over the nonce and the payload


class Probe(Asks[Probed], kind="probe", traffic=Traffic.CONTROL, asker=Asker.ANYBODY):
    """Measure the link: answered by `Probed` at once, without the compute thread. May be repeated, but not often.

    Without a tensor, on the control stream, it tells the round trip; with one of up to `MAX_PROBE_BYTES`, on the
    state stream, the bandwidth. Deadlines are the sender's. A failure leaves nothing behind on either side.
    Refusals: "too-often" (counts as a breach), "unknown-request" (an earlier version).
    """

    nonce: Annotated[bytes, Field(min_length=8, max_length=8)]
