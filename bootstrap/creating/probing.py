"""A probe of what a tokenizer keeps of a text, before a run is founded on it.

Texts in many scripts are encoded with it and compared. What would end training, or vanish from documents without a
word, is refused; what is lost by the tokenizer's own rules is told.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tokenizers

from node.data.text_alone import unknown_name
from node.data.tokenizer import FileTokenizer
from protocol.errors import DataError, TokenizerError

WORDS = ("größer", "Ärger", "中文", "🙂", "Qxz7")  # what examples are taken from first
LETTERS = (
    "eaAzZ09é"
    + "ñöжשع中の한ก🙂"
    + "".join(map(chr, range(0x21, 0x7F)))  # ASCII
    + "".join(map(chr, range(0xC0, 0x100)))  # every byte that goes on with a character
    + "".join(
        chr(0x21 + 0x40 * lead) for lead in range(2, 0x20)
    )  # those that begin one of two bytes, and of more
    + "अა€あ一大文的语题가나이하\ue0b5\uf8ff𒀀𓀀\U00040000\U00080000\U000c0000\U0010fffd"
)
SPACES = ("", " ", "  ", "\n", "\t")
MOST_SHOWN = 4


@dataclass
class _Findings:
    """Samples that cannot be encoded, vanish, and become the unknown token. Mutable while the samples are tried."""

    unwritable: list[str]
    vanishing: list[str]
    unknown: list[str]


def probe(raw: bytes, end_of_text: str) -> str:
    """One sentence on what documents lose by being encoded with the tokenizer.json `raw`; empty for nothing.

    Raises `TokenizerError` when some text would end training, vanish, or end other documents.
    """
    return _Probe(raw, end_of_text).verdict()


class _Probe:
    def __init__(self, raw: bytes, end_of_text: str) -> None:
        self._tokenizer = FileTokenizer(raw, end_of_text)
        self._file = tokenizers.Tokenizer.from_str(raw.decode())
        self._unknown = unknown_name(json.loads(self._file.to_str()), end_of_text)

    def verdict(self) -> str:
        found = self._findings()
        for texts, consequence, remedy in (
            (found.unwritable, "training would end at the first document with it", ""),
            (found.vanishing, "it would vanish from documents", " or all 256 bytes"),
        ):
            if texts:
                raise TokenizerError(
                    f"The tokenizer has no token for some text, as {_shown(texts)}, and {consequence}. Give it an "
                    f"unknown token (not the end of text){remedy}, or take another --tokenizer."
                )
        lost = [*self._alike(), *self._unknown_told(found.unknown)]
        if lost:
            return f"The tokenizer does not keep all of a text: {'; '.join(lost)}."
        return self._not_coming_back()

    def _findings(self) -> _Findings:
        found = _Findings([], [], [])
        same = self._indistinguishable()
        for text in (*WORDS, *dict.fromkeys(LETTERS)):
            ids = self._ids(text)
            if ids is None:
                found.unwritable.append(text)
            elif self._unknown is not None and self._file.token_to_id(self._unknown) in ids:
                found.unknown.append(text)
            elif text in same or (self._normal(text) and (not ids or "\ufffd" in self._text(ids))):
                found.vanishing.append(text)
        return found

    def _indistinguishable(self) -> set[str]:
        """Letters that have the ids of another letter, though the tokenizer's normalizer tells them apart."""
        groups = defaultdict(list)
        for letter in dict.fromkeys(LETTERS):
            if self._normal(letter) and (ids := self._ids(letter)) is not None:
                groups[tuple(ids)].append(letter)
        mixed = (group for group in groups.values() if len({self._normal(letter) for letter in group}) > 1)
        return {letter for group in mixed for letter in group}

    def _alike(self) -> list[str]:
        """Say what the tokenizer loses of upper case, accents and white space."""
        cases = (
            ("upper case", (("a", "A"), ("z", "Z"))),
            ("accents", (("e", "é"), ("n", "ñ"))),
            ("white space", tuple((f"a{one}z", f"a{two}z") for one in SPACES for two in SPACES if one < two)),
        )
        return [
            f"{name} {'are' if name == 'accents' else 'is'} lost"
            for name, pairs in cases
            if any(self._are_alike(*pair) for pair in pairs)
        ]

    def _are_alike(self, one: str, two: str) -> bool:
        ids = self._ids(one)
        return bool(ids) and ids == self._ids(two) and not self._is_unknown(one)

    def _is_unknown(self, text: str) -> bool:
        ids = self._ids(text)
        return self._unknown is not None and self._file.token_to_id(self._unknown) in (ids or ())

    def _unknown_told(self, unknown: Sequence[str]) -> list[str]:
        return [f"what it has no token for, as {_shown(unknown)}, becomes {self._unknown}"] if unknown else []

    def _not_coming_back(self) -> str:
        text = "the cat sat,\n and ran"
        back = self._text(self._ids(text) or [])
        if back == text:
            return ""
        return (
            f"Text does not come back from the tokenizer's tokens as it was: {text!r} becomes {back!r}, and what the "
            "model generates will look so. The decoder in tokenizer.json says how tokens are joined."
        )

    def _ids(self, text: str) -> list[int] | None:
        """The ids of a text; None when the tokenizer fails."""
        try:
            ids: list[int] = self._tokenizer.encode_batch([text])[0].tolist()
        except DataError:
            return None
        return ids

    def _text(self, ids: list[int]) -> str:
        text: str = self._file.decode(ids, skip_special_tokens=False)
        return text

    def _normal(self, text: str) -> str:
        """The text as the tokenizer's own normalizer leaves it, in lower case for instance."""
        normalizer = self._file.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))


def _shown(texts: Iterable[str]) -> str:
    return ", ".join(repr(text) for text in list(texts)[:MOST_SHOWN])
