"""The tokenizer that goes with a model: text to tokens as in training, tokens to text, and its files in an export."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import decoders

from bootstrap.export.byte_tokenizer import BYTES_END, byte_tokenizer
from bootstrap.export.checkpoint import save_json
from bootstrap.inspect.observer import Observer
from node.data.tokenizer import FileTokenizer, load_tokenizer
from node.data.tokenizer_files import CONFIG, FILE_NAME
from node.membership.data_source import RunTokenizer
from protocol.run.manifest import BYTES, Manifest


class ModelTokenizer:
    """A tokenizer.json applied to texts.

    `begin` and `end` are the ids of the tokens that begin and end one, None where there is none; `context` is the
    longest text that the model was trained on, in tokens.
    """

    def __init__(
        self,
        file: tokenizers.Tokenizer,
        begin_name: str | None,
        end_name: str | None,
        context: int,
        chat_template: str = "",
    ) -> None:
        self._file = file
        self._begin_name, self._end_name = begin_name, end_name
        self.begin: int | None = None if begin_name is None else file.token_to_id(begin_name)
        self.end: int | None = None if end_name is None else file.token_to_id(end_name)
        self.context = context
        self._chat_template = chat_template  # of what the run started from; empty for none

    def ids_of(self, text: str) -> list[int]:
        """The tokens of `text` alone: none around it, and what reads like a special token is text."""
        if self.end is not None:
            found: list[int] = self._reader.encode_batch([text])[0].tolist()
            return found
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _reader(self) -> FileTokenizer:
        """The file's tokenizer as training uses it."""
        return FileTokenizer(self._file.to_str().encode(), str(self._end_name))

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The tokenizer of a file with nothing that ends a text, which no run could have."""
        plain = tokenizers.Tokenizer.from_str(self._file.to_str())
        plain.no_truncation()
        plain.no_padding()
        plain.encode_special_tokens = True
        return plain

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of `ids` as a person reads it, without the names of special tokens."""
        text: str = self._file.decode(list(ids), skip_special_tokens=True)
        return text

    def byte_count(self, ids: Sequence[int], before: int | None = None) -> int:
        """Count the bytes of text that `ids` stand for after the token `before`; an end of text is none.

        Exact where tokens are bytes under other names. Elsewhere a character cut at either end counts as its
        replacement.
        """
        if isinstance(self._file.decoder, decoders.ByteLevel):
            return sum(self._length(token) for token in ids if token != self.end)
        total, part = 0, list[int]()
        context = [] if before is None or before == self.end else [before]
        for token in [*ids, self.end]:
            if token != self.end and token is not None:
                part.append(token)
                continue
            if part:
                total += self._decoded_bytes(context + part) - self._decoded_bytes(context)
            part, context = [], []
        return total

    def _length(self, token: int) -> int:
        """Bytes of a token whose name has a character for each byte, or, for an added one, is its text."""
        added = self._added.get(token)
        return len(str(self._file.id_to_token(token))) if added is None else len(added.encode())

    @cached_property
    def _added(self) -> dict[int, str]:
        return {token: str(added.content) for token, added in self._file.get_added_tokens_decoder().items()}

    def _decoded_bytes(self, ids: Sequence[int]) -> int:
        return len(self._file.decode(list(ids), skip_special_tokens=False).encode("utf-8", errors="replace"))

    def special_ids(self) -> dict[str, int | None]:
        """Ids of special tokens as config.json and generation_config.json name them: what ends a text also pads."""
        return {"bos_token_id": self.begin, "eos_token_id": self.end, "pad_token_id": self.end}

    def save(self, directory: Path) -> None:
        """Write its files for transformers 4 and 5: a class that both have, and only what a causal model takes."""
        self._file.save(str(directory / FILE_NAME))
        names = {
            "bos_token": self._begin_name,
            "eos_token": self._end_name,
            "pad_token": self._end_name,
        }
        settings = {
            "backend": "tokenizers",
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": self.context,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        chats = {"chat_template": self._chat_template} if self._chat_template else {}
        save_json(settings | names | chats, directory / CONFIG)


def tokenizer_of_run(manifest: Manifest, raw: bytes | None) -> ModelTokenizer:
    """The run's tokenizer; `raw` is its tokenizer.json, None where bytes are tokens.

    It adds nothing to a text, as training did not. The token that ends a text also begins one and pads. Raises
    `TokenizerError` for another file than the manifest names.
    """
    load_tokenizer(raw, manifest)  # checks it
    if manifest.data.tokenizer == BYTES or raw is None:
        file, end = byte_tokenizer(), BYTES_END
    else:
        file, end = _adding_nothing(raw), manifest.data.end_of_text
    template = "" if manifest.start is None else manifest.start.chat_template
    return ModelTokenizer(file, end, end, manifest.data.sequence_tokens, template)


def fingerprint_of(manifest: Manifest, raw: bytes | None) -> str:
    """The fingerprint by which the export's own file is known as the run's tokenizer; empty where bytes are
    tokens.
    """
    return FileTokenizer(raw, manifest.data.end_of_text).fingerprint() if raw is not None else ""


def _adding_nothing(raw: bytes) -> tokenizers.Tokenizer:
    """A tokenizer.json without what its last user had put around, behind or instead of a text's own tokens."""
    settings = json.loads(tokenizers.Tokenizer.from_str(raw.decode()).to_str())
    if settings["model"]["type"] == "BPE":
        settings["model"]["dropout"] = None
    return tokenizers.Tokenizer.from_str(
        json.dumps(settings | {"truncation": None, "padding": None, "post_processor": None})
    )


async def tokenizer_file(observer: Observer, own: str) -> bytes | None:
    """The run's tokenizer.json, `own` where that is named, else from members; None where bytes are tokens.

    Raises `TokenizerError` when it is not the run's, or nobody gives it.
    """
    if observer.manifest.data.tokenizer == BYTES:
        return None
    await observer.survey()
    tokenizer = RunTokenizer(observer.signed, observer.rpc, observer.view, own=own)
    await tokenizer.get()
    return tokenizer.raw
