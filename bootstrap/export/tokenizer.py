"""A run's tokenizer as transformers knows it, and how a visitor gets it: text to tokens with nothing of ours."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from bootstrap.inspect.observer import Observer
from node.data.tokenizer import load_tokenizer
from node.membership.data_source import RunTokenizer
from protocol.manifest import BYTES, Manifest

BYTES_END = "\0"  # byte 0, which no text holds, ends one


def transformers_tokenizer(manifest: Manifest, raw: bytes | None) -> PreTrainedTokenizerFast:
    """The run's tokenizer as transformers knows it; `raw` is its tokenizer.json, None where bytes are tokens.

    Its one special token ends a text, and so also begins one and fills up. Raises `TokenizerError` for another file
    than the manifest names.
    """
    load_tokenizer(raw, manifest)  # checks it
    if manifest.data.tokenizer == BYTES or raw is None:
        backend, end = byte_tokenizer(), BYTES_END
    else:
        backend, end = tokenizers.Tokenizer.from_str(raw.decode()), manifest.data.end_of_text
        backend.no_truncation()
        backend.no_padding()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=end,
        eos_token=end,
        pad_token=end,
        model_max_length=manifest.data.sequence_tokens,
        clean_up_tokenization_spaces=False,
    )


def byte_tokenizer() -> tokenizers.Tokenizer:
    """256 tokens, and each byte is its own id: any text becomes its UTF-8, any ids the text of their bytes.

    Byte 0 is a special token under its own name; the other bytes have the printable names that GPT-2 gave them.
    """
    names: dict[int, str] = {**bytes_to_unicode(), 0: BYTES_END}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={name: i for i, name in names.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(BYTES_END, special=True, normalized=False)])
    return tokenizer


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of `text` alone, as in training: none around it, and what reads like a special token is text."""
    settings = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    ids: list[int] = tokenizer.encode(text, **settings)
    return ids


def byte_count(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], before: int | None = None) -> int:
    """How many bytes of text `ids` stand for where the token `before` precedes them; an end of text is none.

    Exact where tokens are bytes under other names. Elsewhere a character cut at either end counts as its replacement.
    """
    end, total = tokenizer.eos_token_id, 0
    kept = [i for i in ids if i != end]
    if tokenizer.is_fast and isinstance(tokenizer.backend_tokenizer.decoder, decoders.ByteLevel):
        added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
        names = zip(kept, tokenizer.convert_ids_to_tokens(kept), strict=True)
        return sum(len(added[i].encode()) if i in added else len(name) for i, name in names)
    part: list[int] = []
    context = [] if before in (None, end) else [before]
    for token in [*ids, end]:
        if token != end:
            part.append(token)
        elif part:
            total += _decoded_bytes(tokenizer, context + part) - _decoded_bytes(tokenizer, context)
        if token == end:
            part, context = [], []
    return total


def _decoded_bytes(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int | None]) -> int:
    text: str = tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
    return len(text.encode("utf-8", errors="replace"))


async def tokenizer_file(observer: Observer, own: str) -> bytes | None:
    """The run's tokenizer.json, `own` where that is named, else from members; None where bytes are tokens.

    Raises `TokenizerError` when it is not the run's, or nobody gives it.
    """
    if observer.manifest.data.tokenizer == BYTES:
        return None
    await observer.survey()
    tokenizer = RunTokenizer(observer.manifest, observer.rpc, observer.view, own=own)
    await tokenizer.get()
    return tokenizer.raw
