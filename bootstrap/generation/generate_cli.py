"""`noloco generate`: let a model go on with a text."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from bootstrap.generation.decoding import Decoding
from bootstrap.model_options import Join, ModelDirectory, TokenizerFile
from node.command import fail, run_async
from protocol.errors import NolocoError, UserError


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; read from stdin by default.")
    ] = None,
    model: ModelDirectory = None,
    join: Join = None,
    tokens: Annotated[int, typer.Option(help="Maximum number of tokens to generate.")] = 100,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 always picks the most likely token.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 means all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the most likely tokens up to this total probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same text.")] = 0,
    tokenizer: TokenizerFile = "",
) -> None:
    """Let a model go on with a text: one in a directory, or straight from a running swarm."""
    try:
        decoding = Decoding(tokens, temperature, top_k, top_p, seed)
        if (model is None) == (not join):
            raise UserError("Tell which model: --model DIRECTORY of an export, or --join ADDRESS of a run.")
        text = _prompt(prompt)
        from bootstrap.generation.writing import generate_from_export, generate_from_swarm

        if model is not None:
            generate_from_export(model, text, decoding)
            return
    except NolocoError as error:
        fail(error)
    run_async(generate_from_swarm(join or [], text, decoding, tokenizer))


def _prompt(argument: str | None) -> str:
    if argument is not None and argument != "-":
        return argument
    if sys.stdin.isatty():
        raise UserError('Give the text to go on with: noloco generate "Once upon a time" …, or on stdin.')
    return sys.stdin.buffer.read().decode("utf-8", errors="replace")
