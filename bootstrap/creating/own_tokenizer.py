"""A tokenizer trained on a founder's text: a byte-level BPE, which has a token for every text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from node.data.documents import cut
from node.data.sources import documents_of
from node.data.tokenizer import END_OF_TEXT_NAMES
from protocol.errors import DataError

END_OF_TEXT = END_OF_TEXT_NAMES[0]
LEAST = 257  # tokens: each byte has one, and the end of a text
MOST_BYTES = 2**28  # of text that is read: pairs of it are counted in memory, and more of it changes little
PIECE_BYTES = 2**16
SAMPLE_BYTES = 2**20  # on which bytes per token are counted


@dataclass(frozen=True)
class OwnTokenizer:
    raw: bytes  # its tokenizer.json
    tokens: int
    bytes_per_token: float  # of the first text


def trained(entries: Sequence[str], field: str, vocabulary: int) -> OwnTokenizer:
    """Train `vocabulary` tokens on the first `MOST_BYTES` of the text; fewer where it has too few words.

    Raises `DataError` for text that cannot be read, and for none.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = "".join(_pieces(entries, field, SAMPLE_BYTES))
    if not sample:
        raise DataError("There is no text to train a tokenizer on. Name files with text in them.")
    tokenizer.train_from_iterator(_pieces(entries, field, MOST_BYTES), trainer)
    count = len(tokenizer.encode(sample).ids)
    return OwnTokenizer(
        str(tokenizer.to_str()).encode(), tokenizer.get_vocab_size(), len(sample.encode()) / count
    )


def _pieces(entries: Sequence[str], field: str, most: int) -> Iterator[str]:
    """Yield the text in pieces, until `most` bytes of it."""
    read = 0
    for document in documents_of(entries, field):
        for piece in cut(document, PIECE_BYTES):
            if read >= most:
                return
            read += len(piece)
            yield piece.decode("utf-8")
