"""`noloco generate`: let a model continue a text; how the next token is chosen, for an export and a swarm alike."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from bootstrap.model_options import AccessToken, Join, ModelDirectory, TokenizerFile
from node.command import fail, run_async
from node.data.contents import without_mark
from node.data.rows import mended
from node.watch.events import set_up_logging
from protocol.errors import NolocoError, UserError


def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; from stdin by default.")] = None,
    model: ModelDirectory = None,
    join: Join = None,
    token: AccessToken = "",
    tokens: Annotated[int, typer.Option(help="Maximum number of tokens to generate.")] = 100,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0: always the likeliest.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 means all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens, up to this sum.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same text.")] = 0,
    tokenizer: TokenizerFile = "",
) -> None:
    """Let a model continue a text: one in a directory, or straight from a running swarm.

    Example: noloco generate "Once upon a time" --model model --temperature 0.8
    """
    set_up_logging(verbose=False, least=logging.ERROR)  # lines of the network would stand in the text
    try:
        decoding = Decoding(tokens, temperature, top_k, top_p, seed)
        if (model is None) == (not join):
            raise UserError("Name the model: --model DIRECTORY of an export, or --join ADDRESS of a run.")
        text = _prompt(prompt)
        from bootstrap.generation.writing import generate_from_export, generate_from_swarm

        if model is not None:
            generate_from_export(model, text, decoding)
            return
    except NolocoError as error:
        fail(error)
    run_async(generate_from_swarm(join or [], token, text, decoding, tokenizer))


def _prompt(argument: str | None) -> str:
    if argument is not None and argument != "-":
        return mended(argument)
    if sys.stdin.isatty():
        raise UserError('Give the text to continue: noloco generate "Once upon a time" …, or on stdin.')
    return without_mark(sys.stdin.buffer.read()).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Decoding:
    """Temperature 0 is greedy: always the likeliest token. `top_k` 0 and `top_p` 1 leave all tokens in."""

    most_tokens: int = 100
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for wrong, told in (
            (self.most_tokens < 1, "--tokens must be 1 or more."),
            (not 0 <= self.temperature < float("inf"), "--temperature must be 0 (greedy) or more."),
            (self.top_k < 0, "--top-k must be 0 (all tokens) or more."),
            (not 0 < self.top_p <= 1, "--top-p must lie above 0, and at 1 (all tokens) at most."),
            (
                not self.temperature and (self.top_k or self.top_p < 1),
                "--top-k and --top-p choose among tokens: give a --temperature above 0 with them, 0.8 for instance.",
            ),
        ):
            if wrong:
                raise UserError(told)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def needed(self) -> int:
        """How many of the largest logits are needed to choose a token; 0 means all."""
        return 1 if self.is_greedy else self.top_k

    def for_transformers(self) -> dict[str, float]:
        """The same as keyword arguments of `generate`."""
        if self.is_greedy:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
