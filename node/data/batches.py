"""What training draws from: an endless line of microbatches, each with the position at which to go on after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from protocol.manifest import Manifest

Batch: TypeAlias = tuple[Tensor, Tensor]  # inputs and labels, int64 [sequences, tokens] each


@dataclass(frozen=True)
class Position:
    """Where a volunteer is in its corpus; a few numbers that are kept with the checkpoint.

    The next sequence begins at token `token` of the `document`-th document of epoch `epoch`, in the order in which
    this volunteer trains on them. `corpus` is the identity of what was counted.
    """

    corpus: str
    epoch: int = 0
    document: int = 0
    token: int = 0

    def facts(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, facts: Any) -> Position | None:
        """From what was kept; None when that is nothing usable."""
        try:
            corpus, *numbers = facts["corpus"], facts["epoch"], facts["document"], facts["token"]
            if isinstance(corpus, str) and all(isinstance(n, int) and n >= 0 for n in numbers):
                return cls(corpus, *numbers)
        except (TypeError, KeyError):
            pass
        return None


@dataclass
class TokenisingTally:
    """Mutable, written by the thread that makes batches: what it has tokenised, and in how much time."""

    documents: int = 0
    nbytes: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, documents: int, nbytes: int, tokens: int, seconds: float) -> None:
        self.documents += documents
        self.nbytes += nbytes
        self.tokens += tokens
        self.seconds += seconds

    def rate(self) -> tuple[float, float]:
        """Bytes and tokens in a second of tokenising."""
        seconds = max(self.seconds, 1e-9)
        return self.nbytes / seconds, self.tokens / seconds


class TrainingData(Protocol):
    """A corpus as training and validation see it."""

    @property
    def identity(self) -> str:
        """The same for the same text, wherever it is."""

    @property
    def tally(self) -> TokenisingTally: ...

    def require(self, tokens: int) -> None:
        """Raises `DataError` when there is not one sequence of `tokens` to train on; for use at start-up."""

    def batches(
        self, run_id: str, peer_id: str, manifest: Manifest, position: Position
    ) -> Iterator[tuple[Batch, Position]]:
        """Microbatches for ever, seeded by (run, peer), from `position` on, each with the position after it."""

    def validation_batches(self, tokens: int, sequences: int, limit: int | None = None) -> Iterator[Batch]:
        """At most `limit` held-out sequences in batches of `sequences`, the same at every call.

        The last batch may have fewer. Raises `DataError` when there is not one.
        """
