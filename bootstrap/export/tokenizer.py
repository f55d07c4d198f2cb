"""A run's tokenizer as transformers knows it, and how a visitor gets it: text to tokens with nothing of ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import tokenizers
from tokenizers import decoders
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from bootstrap.export.byte_tokenizer import BYTES_END, byte_tokenizer
from bootstrap.inspect.observer import Observer
from node.data.tokenizer import FileTokenizer, load_tokenizer
from node.data.tokenizer_files import CONFIG
from node.membership.data_source import RunTokenizer
from protocol.manifest import BYTES, Manifest


def transformers_tokenizer(manifest: Manifest, raw: bytes | None) -> PreTrainedTokenizerFast:
    """The run's tokenizer as transformers knows it; `raw` is its tokenizer.json, None where bytes are tokens.

    It adds nothing to a text, as training did not. The token that ends a text also begins one and fills up. Raises
    `TokenizerError` for another file than the manifest names.
    """
    load_tokenizer(raw, manifest)  # checks it
    if manifest.data.tokenizer == BYTES or raw is None:
        backend, end = byte_tokenizer(), BYTES_END
    else:
        backend, end = _adding_nothing(raw), manifest.data.end_of_text
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=end,
        eos_token=end,
        pad_token=end,
        model_max_length=manifest.data.sequence_tokens,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write its files for transformers 4 and 5: a class that both have, and only what a causal model takes."""
    tokenizer.save_pretrained(directory)
    path = directory / CONFIG
    contents = json.loads(path.read_text(encoding="utf-8"))
    both = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    path.write_text(json.dumps(contents | both, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def fingerprint_of(manifest: Manifest, raw: bytes | None) -> str:
    """By which the export's own file is known as the run's tokenizer; empty where bytes are tokens."""
    return FileTokenizer(raw, manifest.data.end_of_text).fingerprint() if raw is not None else ""


def _adding_nothing(raw: bytes) -> tokenizers.Tokenizer:
    """A tokenizer.json without what its last user had put around, behind or instead of a text's own tokens."""
    settings = json.loads(tokenizers.Tokenizer.from_str(raw.decode()).to_str())
    if settings["model"]["type"] == "BPE":
        settings["model"]["dropout"] = None
    return tokenizers.Tokenizer.from_str(
        json.dumps(settings | {"truncation": None, "padding": None, "post_processor": None})
    )


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of `text` alone, as in training: none around it, and what reads like a special token is text."""
    reader = _reader(tokenizer)
    if reader is not None:
        found: list[int] = reader.encode_batch([text])[0].tolist()
        return found
    settings = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    ids: list[int] = tokenizer.encode(text, **settings)
    return ids


@lru_cache(maxsize=2)
def _reader(tokenizer: PreTrainedTokenizerBase) -> FileTokenizer | None:
    """What training would make of its file; None for one that has no file, or nothing that ends a text."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.eos_token is None:
        return None
    return FileTokenizer(tokenizer.backend_tokenizer.to_str().encode(), str(tokenizer.eos_token))


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
