"""Small tokenizers, trained on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = (
    "def train(model): return model.step()  # größer, 中文, 🙂\n",
    "the cat sat on the mat and ran away\n",
)


@cache
def bpe(vocabulary: int = 300, special: Sequence[str] = ("<|endoftext|>",)) -> bytes:
    """A byte-level BPE's tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 10, trainer)
    return str(tokenizer.to_str()).encode()


def text_of(ids: list[int], raw: bytes | None) -> str:
    """The text of `ids` of the tokenizer.json `raw`; without one they are bytes."""
    if raw is None:
        return bytes(ids).decode("utf-8")
    text: str = Tokenizer.from_str(raw.decode()).decode(ids, skip_special_tokens=True)
    return text
