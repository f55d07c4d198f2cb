"""The tokenizer of runs whose tokens are bytes, as a tokenizer.json: exports have it, checkpoints are known by it."""

from __future__ import annotations

import itertools

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

BYTES_END = "\0"  # byte 0, which no text holds, ends one
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}


def byte_tokenizer() -> tokenizers.Tokenizer:
    """256 tokens, and each byte is its own id: any text becomes its UTF-8, any ids the text of their bytes.

    Byte 0 is a special token under its own name; the other bytes have the printable names that GPT-2 gave them.
    """
    names = dict(enumerate(_names())) | {0: BYTES_END}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={name: i for i, name in names.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(BYTES_END, special=True, normalized=False)])
    return tokenizer


def is_byte_tokenizer(raw: bytes) -> bool:
    """Return whether a tokenizer.json is that of an export whose run had bytes as tokens."""
    try:
        vocabulary = tokenizers.Tokenizer.from_str(raw.decode()).get_vocab()
    except Exception:  # noqa: BLE001  the library raises nothing narrower; what it is will be told by whoever loads it
        return False
    return bool(vocabulary == byte_tokenizer().get_vocab())


def _names() -> list[str]:
    """GPT-2's names of the 256 bytes: themselves where they can be printed, the characters from 256 on elsewhere."""
    others = itertools.count(256)
    return [chr(byte) if byte in _PRINTABLE else chr(next(others)) for byte in range(256)]
