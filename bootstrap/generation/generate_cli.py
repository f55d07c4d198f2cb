"""`noloco generate`: let a model continue a text."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from bootstrap.generation.decoding import Decoding
from bootstrap.model_options import AccessToken, Join, ModelDirectory, TokenizerFile
from node.command import doing, fail, run_async
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
    """Let a model continue a text: an export, or that of a run.

    Example: noloco generate "Once upon a time" --model model --temperature 0.8
    """
    set_up_logging(verbose=False, least=logging.ERROR)  # lines of the network would stand in the text
    try:
        decoding = Decoding(tokens, temperature, top_k, top_p, seed)
        if (model is None) == (not join):
            raise UserError("Name the model: --model DIRECTORY of an export, or --join ADDRESS of a run.")
        text = _prompt(prompt)
        doing("Getting the model ready")
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
