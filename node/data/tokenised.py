"""Documents and a tokenizer together: what a run with a text of its own trains and validates on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from node.data.batches import Batch, Position, TokenisingTally
from node.data.documents import Documents
from node.data.packing import batch_of, packed_once, sequences
from node.data.tokenizer import Ids, Tokenizer
from protocol.errors import DataError
from protocol.manifest import Manifest


class TokenisedDocuments:
    """`TrainingData` over any documents. Nothing is tokenised before it is needed, and nothing of it is kept."""

    def __init__(self, documents: Documents, tokenizer: Tokenizer) -> None:
        self._documents = documents
        self._tokenizer = tokenizer
        self.identity = documents.identity
        self.tally = TokenisingTally()

    def require(self, tokens: int) -> None:
        some = self._documents.training((), 0, 0)
        if next(packed_once(some, self._tokenizer, tokens), None) is None:
            raise DataError(
                f"The data is too short to train on: sequences have {tokens} tokens, and all documents that are not "
                "held out have no more. Name more text with --data."
            )

    def batches(
        self, run_id: str, peer_id: str, manifest: Manifest, position: Position
    ) -> Iterator[tuple[Batch, Position]]:
        def read(epoch: int, first: int) -> Iterator[str]:
            return self._documents.training((run_id, peer_id), epoch, first)

        tokens, size = manifest.data.sequence_tokens, manifest.inner.sequences
        line = sequences(read, self._tokenizer, tokens, position, self.tally)
        while True:
            drawn = list(islice(line, size))
            yield batch_of([ids for ids, _ in drawn]), drawn[-1][1]

    def validation_batches(self, tokens: int, sequences: int, limit: int | None = None) -> Iterator[Batch]:
        held_out = self._held_out(tokens, limit)
        rows = list(islice(held_out, sequences))
        if not rows:
            raise DataError(
                f"The held-out documents of the data have fewer than the {tokens + 1} tokens of a sequence. Name "
                "more text, or found the run with a larger data.held_out or a smaller data.longest_document."
            )
        while rows:
            yield batch_of(rows)
            rows = list(islice(held_out, sequences))

    def _held_out(self, tokens: int, limit: int | None) -> Iterator[Ids]:
        return islice(packed_once(self._documents.held_out(), self._tokenizer, tokens), limit)
