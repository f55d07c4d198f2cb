"""The work of `noloco generate`: a text goes on, written character by character as its tokens come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

from bootstrap.export.tokenizer import ModelTokenizer, tokenizer_file, tokenizer_of_run
from bootstrap.generation.decoding import Decoding
from bootstrap.generation.exported import generate_tokens, load_exported
from bootstrap.generation.swarm_answer import SwarmAnswer
from bootstrap.inspect.observer import visit
from node.watch.words import print_wrapped
from protocol.errors import DataError, legible


def generate_from_export(directory: Path, prompt: str, decoding: Decoding) -> None:
    loaded = load_exported(directory)
    ids = first_tokens(loaded.tokenizer, prompt, loaded.context)
    stream = TextStream(loaded.tokenizer, _write, ids)
    generate_tokens(loaded, ids, decoding, stream.put)
    _end(stream, len(ids), loaded.context, decoding)


async def generate_from_swarm(join: list[str], token: str, prompt: str, decoding: Decoding, own: str) -> None:
    async with visit(join, token) as observer:
        tokenizer = tokenizer_of_run(observer.manifest, await tokenizer_file(observer, own))
        ids = first_tokens(tokenizer, prompt, tokenizer.context)
        route, *others = await observer.drawn_routes()
        answer = SwarmAnswer(observer, route, _note, others)
        stream = TextStream(tokenizer, _write, ids)
        async for chosen in answer.tokens(ids, decoding, tokenizer.end):
            stream.put(chosen)
        _end(stream, len(ids), tokenizer.context, decoding)


def first_tokens(tokenizer: ModelTokenizer, prompt: str, context: int) -> list[int]:
    """The prompt's tokens; for an empty one the token that texts begin with.

    Raises `DataError` when the context leaves no room for an answer.
    """
    ids = tokenizer.ids_of(prompt)
    if not ids and tokenizer.begin is not None:
        ids = [tokenizer.begin]
    if not 0 < len(ids) < context:
        raise DataError(
            f"The prompt has {len(ids):,} tokens; this model's context of {context:,} has room for 1 to "
            f"{context - 1:,}. {'Shorten it.' if ids else 'Write something.'}"
        )
    return ids


def _end(stream: TextStream, prompt_tokens: int, context: int, decoding: Decoding) -> None:
    stream.end()
    _write("\n")
    if prompt_tokens + len(stream.tokens) >= context and len(stream.tokens) < decoding.most_tokens:
        _note(f"The text ends here: the model's context of {context:,} tokens is full.")


def _write(text: str) -> None:
    """Write legible text to the terminal: peers chose the tokens, which may be an escape sequence's."""
    sys.stdout.write(legible(text))
    sys.stdout.flush()


def _note(sentence: str) -> None:
    print_wrapped(f"\n{sentence}", on_error=True)


_UNFINISHED = "�"  # how the bytes of a character are shown while some are missing


class TextStream:
    """Writes tokens as text, as soon as they make whole characters.

    Mutable state: the tokens so far and how much of their text was written.

    They are read together with those of the prompt: alone, a tokenizer that marks where words begin reads no space
    before the first.
    """

    def __init__(
        self, tokenizer: ModelTokenizer, tell: Callable[[str], None], prompt: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._tell = tell
        self._prompt = list(prompt)
        self._prompt_text = tokenizer.text_of(self._prompt)
        self.tokens: list[int] = []
        self._told = 0

    @property
    def text(self) -> str:
        whole = self._tokenizer.text_of(self._prompt + self.tokens)
        pairs = zip(whole, self._prompt_text, strict=False)
        return whole[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]

    def put(self, token: int) -> None:
        self.tokens.append(token)
        text = self.text
        if not text.endswith(_UNFINISHED):
            self._tell_rest(text)

    def end(self) -> str:
        """Write the rest as it is. Returns the whole text."""
        text = self.text
        self._tell_rest(text)
        return text

    def _tell_rest(self, text: str) -> None:
        if len(text) > self._told:
            self._tell(text[self._told :])
            self._told = len(text)
