"""Text to token ids and back: bytes as they are, or whatever a tokenizer.json says.

A manifest names its tokenizer by the SHA-256 of that file, never by a path: `load_tokenizer` takes the file's
contents from wherever they came and refuses all others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import tokenizers
from numpy.typing import NDArray

from node.data.contents import without_mark
from node.data.sources import HUB
from node.machine.home import at_home
from protocol.errors import TokenizerError
from protocol.manifest import BYTES, Manifest
from protocol.messages.peers import MAX_TOKENIZER_BYTES

Ids: TypeAlias = NDArray[np.int32]

FILE_NAME = "tokenizer.json"

# what the tokenizers in use call the token that ends a text, in the order in which they are looked for
END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eot_id|>")


class Tokenizer(Protocol):
    """Ids are below `size`; `end_of_text` stands between documents. May be used from several threads at once."""

    size: int
    end_of_text: int

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text alone: no special tokens are added, and none are read from the text.

        Uses all cores where the tokenizer can.
        """


class ByteTokenizer:
    """UTF-8 bytes are the ids. Byte 0, which no text holds, ends a text; a NUL in a document is left out."""

    size = 256
    end_of_text = 0

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        found = (text.encode("utf-8", errors="replace").replace(b"\0", b"") for text in texts)
        return [np.frombuffer(each, np.uint8).astype(np.int32) for each in found]


class FileTokenizer:
    """What a tokenizer.json describes. Raises `TokenizerError` when `raw` is none, or lacks `end_of_text`."""

    def __init__(self, raw: bytes, end_of_text: str) -> None:
        self._tokenizer = _parse(raw)
        self._tokenizer.no_truncation()  # a file may ask for both, as its last user had them
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # text that reads like one is no end of text
        self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        token = self._tokenizer.token_to_id(end_of_text)
        if token is None:
            raise TokenizerError(
                f"The tokenizer has no token {end_of_text!r}, which is to end texts. Name one that it has with "
                "--end-of-text, or add it to the tokenizer."
            )
        self.end_of_text = int(token)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]


def load_tokenizer(raw: bytes | None, manifest: Manifest) -> Tokenizer:
    """The run's tokenizer. `raw` holds the tokenizer.json; None is enough where bytes are tokens.

    Raises `TokenizerError` when it is another file than the manifest names, none at all, or does not fit.
    """
    expected = manifest.data.tokenizer
    if expected == BYTES:
        return ByteTokenizer()
    if raw is None:
        raise TokenizerError(
            f"Run '{manifest.name}' has a tokenizer of its own, and no member reached has it. "
            "Give the run's tokenizer.json with --tokenizer FILE; its owner has it."
        )
    if identity_of(raw) != expected:
        raise TokenizerError(
            f"This is not the tokenizer of run '{manifest.name}': its hash is {identity_of(raw)[:23]}…, the "
            f"manifest names {expected[:23]}…. Leave out --tokenizer to get it from other members."
        )
    tokenizer = FileTokenizer(raw, manifest.data.end_of_text)
    require_fit(tokenizer, manifest.model.vocab_size)
    return tokenizer


def require_fit(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises `TokenizerError` when the model has no embedding for some of the tokenizer's ids."""
    if tokenizer.size > vocab_size:
        raise TokenizerError(
            f"The tokenizer has {tokenizer.size:,} tokens, model.vocab_size is {vocab_size:,}. Set "
            f"model.vocab_size to {tokenizer.size} or more, or take a smaller tokenizer."
        )


def identity_of(raw: bytes) -> str:
    """The name by which a manifest refers to a tokenizer.json."""
    return "sha256:" + hashlib.sha256(raw).hexdigest()


def end_of_text_in(raw: bytes) -> str:
    """The name of the token that ends texts, of those in use. Raises `TokenizerError` when there is none."""
    tokenizer = _parse(raw)
    for name in END_OF_TEXT_NAMES:
        if tokenizer.token_to_id(name) is not None:
            return name
    raise TokenizerError(
        f"The tokenizer has no end-of-text token: none of {', '.join(END_OF_TEXT_NAMES)}. Name the one that "
        "it has with --end-of-text TOKEN, or add one to the tokenizer."
    )


def read_tokenizer(place: str) -> bytes:
    """A tokenizer.json: a file, a directory with one, or hub:NAME. Raises `TokenizerError` with what to do."""
    if place.startswith(HUB):
        return _from_hub(place.removeprefix(HUB))
    path = at_home(place)
    path = path / FILE_NAME if path.is_dir() else path
    try:
        size = path.stat().st_size
        if size > MAX_TOKENIZER_BYTES:
            raise TokenizerError(
                f"{path} has {size:,} bytes; a tokenizer may have {MAX_TOKENIZER_BYTES:,} at most. "
                "Check that it is a tokenizer.json."
            )
        return without_mark(path.read_bytes())
    except OSError as error:
        raise TokenizerError(
            f"Cannot read the tokenizer {path} ({error.strerror}). Check the path; for one on the Hugging Face "
            f"Hub write --tokenizer {HUB}{place}."
        ) from None


def _from_hub(name: str) -> bytes:
    """The tokenizer of a model on the Hub, also of one that has no tokenizer.json and must be converted."""
    from transformers import AutoTokenizer

    try:
        raw: str = AutoTokenizer.from_pretrained(name).backend_tokenizer.to_str()
    except Exception as error:  # noqa: BLE001  what the library raises differs with its version and the fault
        reason = str(error).strip().splitlines()
        raise TokenizerError(
            f"Cannot get the tokenizer {name!r} from the Hugging Face Hub "
            f"({reason[0][:120] if reason else type(error).__name__}). Check the name and the connection, or give "
            "a tokenizer.json on this machine with --tokenizer FILE."
        ) from None
    return raw.encode()


def _parse(raw: bytes) -> tokenizers.Tokenizer:
    try:
        text = raw.decode("utf-8")
        json.loads(text)
    except ValueError:
        raise TokenizerError("The tokenizer file is not JSON. Give a Hugging Face tokenizer.json.") from None
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001  the library raises nothing narrower
        raise TokenizerError(
            f"The tokenizer file is JSON, but not a tokenizer ({str(error)[:120]}). Give a tokenizer.json."
        ) from None
