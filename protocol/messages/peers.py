"""What peers ask of each other beside training: who they are, how fast links are, and a stage's state."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from protocol.announcement import ToldLinks
from protocol.messages import Asks, Fraction, Id, Message, Natural, Number, ShortText, Traffic

MAX_PROBE_BYTES = 256 * 1024  # a tenth of a second at 20 Mbit/s
MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
TOKENIZER_PIECE_BYTES = 128 * 1024
MOST_TOLD_PEERS = 256  # of each count by peer in `NodeStats`: some 15 kB, where a frame's header has 256 KiB
Tally = Annotated[dict[Id, Natural], Field(max_length=MOST_TOLD_PEERS)]

# --- getting to know each other -----------------------------------------------------------------


class Welcome(Message, kind="welcome"):
    run_id: Id
    time: Number  # wall clock of the replying peer, seconds since the epoch
    role: Literal["seed", "node"]
    manifest: Annotated[bytes, Field(max_length=64 * 1024)]
    reached: ShortText = (
        ""  # the address at which the asker was dialled as it wished; empty if nobody was there
    )


class Hello(Asks[Welcome], kind="hello", traffic=Traffic.CONTROL):
    """First request on joining. The reply tells the run and, by its clock, whether ours is right.

    A `port` asks to be dialled at that port of the machine that the greeting comes from; 0 asks nothing.
    """

    port: Annotated[int, Field(ge=0, le=65_535)] = 0


class NodeStats(Message, kind="node-stats"):
    """What a node tells of itself on request: the numbers of `noloco status` and of the summary."""

    stage: Natural
    state: ShortText
    step: Natural
    round: Natural
    loss: Number | None = None  # mean training loss of the last step; the last stage alone knows it
    tokens: Natural = 0  # trained on by this replica, also before it was started again
    tokens_per_second: Number = 0.0
    pair_averagings: Natural = 0
    # rounds shared with each partner; with the most frequent ones, if there are many
    partners: Tally = Field(default_factory=dict)
    partner: ShortText = ""  # of the last round; empty when it was alone
    spread: Number | None = None  # replica spread estimated from the last pair distances
    expected_spread: Number | None = None  # as the theory predicts it from the noise of the rounds
    gossip_bytes: Natural = 0  # sent for averaging
    delivered: Natural = 0  # microbatches sent to next-stage peers, all of them
    sent: Tally = Field(default_factory=dict)  # to each one; to the most frequent ones, if there are many
    received: Natural = 0  # microbatches admitted here
    queue: Natural = 0  # microbatches that waited for a place when the last step ended
    seconds_per_microbatch: Number | None = None  # of computing here, forward and backward; None: not known
    resends: Natural = 0
    blocked_seconds: Number = 0.0  # in which a round's exchange kept the replica from training
    uptime: Number = 0.0
    compute_fraction: Fraction | None = None  # of the time since the start, in training work; None: not told
    recent_compute_fraction: Fraction | None = None  # of the last minute
    data_wait_fraction: Fraction | None = None  # of the time in which stage 0 trained, waiting for data
    links: ToldLinks = Field(default_factory=list)  # to the peers that were measured
    probe_breaches: Natural = 0  # probes refused because there were too many, and answers that were nonsense


class GetStats(Asks[NodeStats], kind="get-stats", traffic=Traffic.CONTROL):
    """Asks a node for its numbers."""


# --- links --------------------------------------------------------------------------------------


class Probed(Message, kind="probed"):
    """Everything arrived. The digest cannot be known before, so no answer makes a link look faster than it is."""

    digest: Annotated[bytes, Field(min_length=16, max_length=16)]  # BLAKE2b over the nonce and the payload


class Probe(Asks[Probed], kind="probe", traffic=Traffic.CONTROL):
    """Measure the link: answered by `Probed` at once, without the compute thread. May be repeated, but not often.

    Without a tensor, on the control stream, it tells the round trip; with one of up to `MAX_PROBE_BYTES`, on the
    state stream, the bandwidth. Deadlines are the sender's. A failure leaves nothing behind on either side.
    Refusals: "too-often" (counts as a breach), "unknown-request" (an earlier version).
    """

    nonce: Annotated[bytes, Field(min_length=8, max_length=8)]


# --- state for late joiners and export ----------------------------------------------------------


class StateIndex(Message, kind="state-index"):
    stage: Natural
    step: Natural
    round: Natural
    parameters: Natural
    piece_parameters: Annotated[int, Field(ge=1, le=2**26)]


class GetStateIndex(Asks[StateIndex], kind="get-state-index", traffic=Traffic.STATE):
    """Asks a replica what its state consists of."""


class StatePiece(Message, kind="state-piece"):
    """Tensors, each [entries of this piece]: φ, and with moments δ, first and second moment of AdamW."""

    index: Natural
    step: Natural
    round: Natural
    digest: Annotated[bytes, Field(min_length=32, max_length=32)]  # SHA-256 over the tensors' bytes


class GetStatePiece(Asks[StatePiece], kind="get-state-piece", traffic=Traffic.STATE):
    """A range of the flat state. `moments` asks for δ and AdamW's moments beside φ.

    Refusal: "other-stage". Peers move, and the states of two stages may have the same shape.
    """

    stage: Natural
    index: Natural
    moments: bool


# --- the run's tokenizer -------------------------------------------------------------------------


class TokenizerPiece(Message, kind="tokenizer-piece"):
    """`TOKENIZER_PIECE_BYTES` of it, fewer at the end."""

    total: Annotated[int, Field(ge=1, le=MAX_TOKENIZER_BYTES)]
    contents: Annotated[bytes, Field(max_length=TOKENIZER_PIECE_BYTES)]


class GetTokenizer(Asks[TokenizerPiece], kind="get-tokenizer", traffic=Traffic.STATE):
    """A piece of the run's tokenizer.json, from byte `offset` on. May be repeated.

    Refusal: "no-tokenizer" (not here, not yet, or nothing from there on). The manifest has the hash of the whole.
    """

    offset: Annotated[int, Field(ge=0, lt=MAX_TOKENIZER_BYTES)]
