"""Tokens become text as they come, character by character where a character takes several tokens."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

_UNFINISHED = "�"  # how the bytes of a character are shown while some are missing


class TextStream:
    """Mutable state: the tokens so far and how much of their text was told."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tell: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._tell = tell
        self.tokens: list[int] = []
        self._told = 0

    @property
    def text(self) -> str:
        text: str = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
        return text

    def put(self, token: int) -> None:
        self.tokens.append(token)
        text = self.text
        if not text.endswith(_UNFINISHED):
            self._tell_rest(text)

    def end(self) -> str:
        """Tell what is left, as it is. Returns the whole text."""
        text = self.text
        self._tell_rest(text)
        return text

    def _tell_rest(self, text: str) -> None:
        if len(text) > self._told:
            self._tell(text[self._told :])
            self._told = len(text)
