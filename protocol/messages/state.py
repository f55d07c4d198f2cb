"""Messages that give peers what they lack: the state of a stage, copies of it, and the run's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from protocol.codecs.codec import Encoded
from protocol.ground import Count, Natural
from protocol.messages import Asker, Asks, Message, Traffic
from protocol.messages.layouts import EXACT, Layout
from protocol.messages.peers import MOST_STAGES_ASKED, Size
from protocol.records.announcement import Figure
from protocol.records.forgiving import open_ended
from protocol.run.piece_hashes import (
    MAX_TOKENIZER_BYTES,
    MAX_TOKENIZER_HASHES_BYTES,
    SIGNATURE_BYTES,
    TOKENIZER_PIECE_BYTES,
)

MOST_POSITIONS = 1_024  # of a sample: a part of a piece that is wrong everywhere hides from none of them

# --- state for late joiners and export ----------------------------------------------------------


class StateIndex(Message, kind="state-index"):
    stage: Natural
    step: Count
    round: Count
    parameters: Natural
    piece_parameters: Annotated[int, Field(ge=1, le=2**26)]
    beginning: Natural = 0  # of its lineage, see `protocol.records.lineage`


class GetStateIndex(Asks[StateIndex], kind="get-state-index", traffic=Traffic.STATE, asker=Asker.ANYBODY):
    """Asks a replica what its state consists of."""


class StatePiece(Message, kind="state-piece"):
    """Tensors, each [entries of this piece]: φ, and with moments δ, first and second moment of AdamW."""

    index: Natural
    step: Count
    round: Count
    digest: Annotated[bytes, Field(min_length=32, max_length=32)]  # SHA-256 over the tensors' bytes


class GetStatePiece(Asks[StatePiece], kind="get-state-piece", traffic=Traffic.STATE, asker=Asker.ANYBODY):
    """Asks for a range of the flat state. `moments` asks for δ and AdamW's moments beside φ.

    Refusal: "other-stage". Peers move, and the states of two stages may have the same shape.
    """

    stage: Natural
    index: Natural
    moments: bool

    def layouts(self, sent: Sequence[Encoded]) -> Sequence[Layout]:
        """φ alone, or with δ and both moments: of one size, which the number of parameters says."""
        return [Layout((None,), EXACT)] * (4 if self.moments else 1)


class StateSample(Message, kind="state-sample"):
    """Tensor, float32 [positions]: φ. Beside it how large the rest is, of the square root of the second moment."""

    step: Count
    round: Count
    sizes: Annotated[
        list[Size], Field(min_length=3, max_length=3)
    ]  # root mean squares there: δ, AdamW's moments
    largest: Annotated[list[Size], Field(min_length=2, max_length=2)]  # in the whole piece: |φ|, |δ|


class GetStateSample(Asks[StateSample], kind="get-state-sample", traffic=Traffic.STATE, asker=Asker.ANYBODY):
    """Asks what a replica holds at positions of a piece, counted within it: to see whether a donor's is like others'.

    Refusals: those of `GetStatePiece`, and "no-such-position".
    """

    stage: Natural
    index: Natural
    positions: Annotated[
        list[Annotated[int, Field(ge=0, lt=2**26)]], Field(min_length=1, max_length=MOST_POSITIONS)
    ]

    def layouts(self, sent: Sequence[Encoded]) -> Sequence[Layout]:
        return [Layout((len(self.positions),), EXACT)]


# --- copies of stages that nobody serves ----------------------------------------------------------


@open_ended
class StageCopy(NamedTuple):
    """A copy of a stage's state on a peer's disk. Travels as an array."""

    stage: Natural
    step: Count
    round: Count
    parameters: Natural
    beginning: Natural  # of its lineage, see `protocol.records.lineage`
    begun: Annotated[Figure, Field(ge=0)]
    saved: Figure  # wall clock


class Copies(Message, kind="copies"):
    copies: Annotated[list[StageCopy], Field(max_length=MOST_STAGES_ASKED)]


class GetCopies(Asks[Copies], kind="get-copies", traffic=Traffic.CONTROL, asker=Asker.ANYBODY):
    """Asks which states of these stages the peer has on its disk, of stages that it has served or keeps copies of.

    May be repeated. Refusal: "unknown-request" (an earlier version).
    """

    stages: Annotated[list[Natural], Field(min_length=1, max_length=MOST_STAGES_ASKED)]


class GetCopyPiece(Asks[StatePiece], kind="get-copy-piece", traffic=Traffic.STATE, asker=Asker.ANYBODY):
    """Asks for a range of a copy, with moments, as of `GetStatePiece`. May be repeated.

    Refusals: "no-copy" (not, or not that one any more), "no-such-piece".
    """

    stage: Natural
    beginning: Natural
    step: Natural
    index: Natural

    def layouts(self, sent: Sequence[Encoded]) -> Sequence[Layout]:
        """φ, δ and both moments."""
        return [Layout((None,), EXACT)] * 4


# --- the run's tokenizer -------------------------------------------------------------------------


class TokenizerPiece(Message, kind="tokenizer-piece"):
    """A piece of the run's tokenizer.json: `TOKENIZER_PIECE_BYTES` of it, fewer at the end."""

    total: Annotated[int, Field(ge=1, le=MAX_TOKENIZER_BYTES)]
    contents: Annotated[bytes, Field(max_length=TOKENIZER_PIECE_BYTES)]


class GetTokenizer(Asks[TokenizerPiece], kind="get-tokenizer", traffic=Traffic.STATE, asker=Asker.ANYBODY):
    """Asks for a piece of the run's tokenizer.json, from byte `offset` on. May be repeated.

    Refusal: "no-tokenizer" (not here, not yet, or nothing from there on). The manifest has the hash of the whole.
    """

    offset: Annotated[int, Field(ge=0, lt=MAX_TOKENIZER_BYTES)]


class TokenizerHashes(Message, kind="tokenizer-hashes"):
    """The hashes of the tokenizer's pieces under the run's signature, see `protocol.run.piece_hashes`."""

    sealed: Annotated[bytes, Field(min_length=SIGNATURE_BYTES, max_length=MAX_TOKENIZER_HASHES_BYTES)]


class GetTokenizerHashes(
    Asks[TokenizerHashes], kind="get-tokenizer-hashes", traffic=Traffic.CONTROL, asker=Asker.ANYBODY
):
    """Asks for the hashes of the pieces of the run's tokenizer.json. May be repeated.

    Refusals: "no-hashes" (not here; of a run that was founded before there were any, nowhere), "unknown-request" (an
    earlier version).
    """
