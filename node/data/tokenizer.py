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

from node.data.text_alone import hidden_names, text_alone, unknown_name
from protocol.errors import DataError, TokenizerError
from protocol.run.manifest import BYTES, Manifest

Ids: TypeAlias = NDArray[np.int32]

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


# by this, and the text of each token, it shows whether two files tokenise alike
SAMPLE = (
    "The quick brown fox's 1,234 jumps over   the lazy dog; don't they?\n\tdef train(model): return model.step()\r\n"
    "Ça coûte 3.14 € à l'hôtel, ÄÖÜ größer. Ελληνικά и русский, 中文字符, 日本語のテキスト, 한국어, العربية, עברית, "
    "हिन्दी 🙂👍🏽 https://example.org/a_b?c=%20#d HELLO_World camelCase <b>bold</b> {x: [1, 2]}"
)


class FileTokenizer:
    """The tokenizer of a tokenizer.json.

    Raises `TokenizerError` when `raw` is not one, or `end_of_text` cannot end texts.

    `tokens` counts all tokens that it has; those from `size` on are special ones, which no text becomes.
    """

    def __init__(self, raw: bytes, end_of_text: str) -> None:
        file = parsed(raw)
        token = file.token_to_id(end_of_text)
        if token is None:
            raise TokenizerError(
                f"The tokenizer has no token {end_of_text!r}, which is to end texts. Name one that it has with "
                "--end-of-text, or add it to the tokenizer."
            )
        settings = json.loads(file.to_str())
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(text_alone(settings, end_of_text)))
        self.end_of_text = int(token)
        ids = file.get_vocab(with_added_tokens=True)
        self._hidden = frozenset(hidden_names(settings, end_of_text))
        unwritten = self._hidden - {end_of_text, unknown_name(settings, end_of_text)}
        self._names = sorted((token, name) for name, token in ids.items())
        self.tokens = max(ids.values()) + 1
        self.size = max(token for name, token in ids.items() if name not in unwritten) + 1

    def fingerprint(self) -> str:
        """A name shared by all files that give the same ids under the same names, in whatever form they were
        written.
        """
        named = [[token] for token, name in self._names if name not in self._hidden]
        texts = [SAMPLE, *self._tokenizer.decode_batch(named, skip_special_tokens=False)]
        does = hashlib.sha256(json.dumps([self.end_of_text, self._names]).encode())
        for ids in self.encode_batch(texts):
            does.update(ids.tobytes() + b"|")
        return does.hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text. Raises `DataError`, which shows the text, when one has what there is no token for."""
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # noqa: BLE001  the library raises nothing narrower
            if len(texts) > 1:
                return [ids for text in texts for ids in self.encode_batch([text])]
            raise DataError(_unwritable(texts[0], str(error))) from None
        return [np.array(encoding.ids, np.int32) for encoding in encodings]


def _unwritable(text: str, reason: str) -> str:
    return (
        f"The tokenizer cannot write the text that begins {text[:60]!r} ({reason[:120]}). Leave it out, or found "
        "a run with a tokenizer that has an unknown token or falls back to bytes."
    )


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
    require_fit(tokenizer, manifest)
    return tokenizer


def require_fit(tokenizer: Tokenizer, manifest: Manifest) -> None:
    """Check that the model has an embedding for every id that text can become. Raises `TokenizerError`."""
    vocabulary = manifest.model.vocab_size
    if tokenizer.size <= vocabulary:
        return
    if manifest.start is None:
        raise TokenizerError(
            f"The tokenizer has {tokenizer.size:,} tokens, model.vocab_size is {vocabulary:,}. Set "
            f"model.vocab_size to {tokenizer.size} or more, or take a smaller tokenizer."
        )
    raise TokenizerError(
        f"The tokenizer has {tokenizer.size:,} tokens, the checkpoint {vocabulary:,}. Name the tokenizer that the "
        f"checkpoint was trained with, --tokenizer FILE, or give the checkpoint more rows by transformers: "
        f"model.resize_token_embeddings({tokenizer.size}), then model.save_pretrained."
    )


def identity_of(raw: bytes) -> str:
    """The name by which a manifest refers to a tokenizer.json."""
    return "sha256:" + hashlib.sha256(raw).hexdigest()


def end_of_text_in(raw: bytes) -> str:
    """The name of the token that ends texts, of those in use. Raises `TokenizerError` when there is none."""
    tokenizer = parsed(raw)
    for name in END_OF_TEXT_NAMES:
        if tokenizer.token_to_id(name) is not None:
            return name
    raise TokenizerError(
        f"The tokenizer has no end-of-text token: none of {', '.join(END_OF_TEXT_NAMES)}. Name the one that "
        "it has with --end-of-text TOKEN, or add one to the tokenizer."
    )


def parsed(raw: bytes) -> tokenizers.Tokenizer:
    """The tokenizer of a tokenizer.json as the library reads it. Raises `TokenizerError`."""
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
