"""A tokenizer.json of every kind of model, small, with what a test asks for."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
PIECES = [*"abcdefghijklmnopqrstuvwxyz<>/,.", "the", "th", "at"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MERGES = [("t", "h"), ("th", "e"), ("a", "t")]

MODELS = (
    "BPE of bytes",
    "BPE",
    "BPE that falls back",
    "Unigram",
    "Unigram that falls back",
    "WordPiece",
    "WordLevel",
)
FALLING_BACK = ("BPE that falls back", "Unigram that falls back")
ENDS = ("special", "added", "of the model", "added with flags")


@dataclass(frozen=True)
class Kind:
    """`end` is how the end of text is in the file; all but "of the model" are in its list of added tokens."""

    model: str
    has_unknown: bool
    end: str = "special"
    adds: bool = False  # a post-processor that puts tokens around a text

    def file(self) -> bytes:
        made = self._model()
        if self.has_unknown:
            made.add_special_tokens([UNKNOWN])
        if self.end != "of the model":
            flags = {"lstrip": True, "rstrip": True} if self.end == "added with flags" else {}
            end = AddedToken(END, special=self.end == "special", **flags)
            made.add_special_tokens([BEGIN])
            (made.add_special_tokens if self.end == "special" else made.add_tokens)([end])
        if self.adds:
            made.post_processor = processors.TemplateProcessing(
                single=f"{BEGIN} $A {END}",
                special_tokens=[(name, made.token_to_id(name)) for name in (BEGIN, END)],
            )
        return str(made.to_str()).encode()

    def _model(self) -> Tokenizer:
        special = [*([UNKNOWN] if self.has_unknown else []), BEGIN, END]
        unknown = UNKNOWN if self.has_unknown else None
        if self.model == "BPE of bytes":
            return _bpe_of_bytes(
                [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "at"], unknown
            )
        if self.model.startswith("BPE"):
            falls = self.model in FALLING_BACK
            pieces = [*special, "▁", *PIECES, *(BYTES if falls else [])]
            numbered = {piece: token for token, piece in enumerate(pieces)}
            return _marked(Tokenizer(models.BPE(numbered, MERGES, unk_token=unknown, byte_fallback=falls)))
        if self.model.startswith("Unigram"):
            falls = self.model in FALLING_BACK
            scored = [(name, 0.0) for name in special] + [(piece, -5.0) for piece in ["▁", *PIECES]]
            scored += [(byte, -9.0) for byte in BYTES] if falls else []
            place = 0 if self.has_unknown else None
            return _marked(Tokenizer(models.Unigram(scored, unk_id=place, byte_fallback=falls)))
        return self._of_words(special)

    def _of_words(self, special: list[str]) -> Tokenizer:
        words = [*special, *PIECES, "cat", "sat", "on"]
        if self.model == "WordPiece":
            words += [f"##{piece}" for piece in PIECES]
            made = Tokenizer(models.WordPiece(_numbered(words), unk_token=UNKNOWN))
            made.normalizer, made.decoder = normalizers.Lowercase(), decoders.WordPiece()
        else:
            made = Tokenizer(models.WordLevel(_numbered(words), unk_token=UNKNOWN))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return made


def _numbered(pieces: list[str]) -> dict[str, int]:
    return {piece: token for token, piece in enumerate(pieces)}


def _bpe_of_bytes(pieces: list[str], unknown: str | None) -> Tokenizer:
    made = Tokenizer(models.BPE(_numbered(pieces), MERGES, unk_token=unknown, ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def _marked(made: Tokenizer) -> Tokenizer:
    """As sentencepiece: ▁ where words begin."""
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return made


def with_settings(raw: bytes, **model: object) -> bytes:
    """The file with other settings of its model."""
    settings = json.loads(raw)
    settings["model"] |= model
    return json.dumps(settings).encode()
