"""`noloco generate`: let a model go on with a text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from transformers import PreTrainedTokenizerBase

from bootstrap.export.tokenizer import ids_of, transformers_tokenizer
from bootstrap.generation.decoding import Decoding
from bootstrap.generation.exported import generate_tokens, load_exported
from bootstrap.generation.swarm_answer import SwarmAnswer
from bootstrap.generation.text_stream import TextStream
from bootstrap.model_options import Join, ModelDirectory, TokenizerFile, tokenizer_file
from bootstrap.observer import visit
from node.command import fail, run_async
from protocol.errors import DataError, NolocoError, UserError


def generate(
    prompt: Annotated[str | None, typer.Argument(help="What the text begins with; default: stdin.")] = None,
    model: ModelDirectory = None,
    join: Join = None,
    tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 100,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Choose among so many of the likeliest; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest of this total probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    tokenizer: TokenizerFile = "",
) -> None:
    """Let a model go on with a text: one in a directory, or straight from a running swarm."""
    try:
        decoding = Decoding(tokens, temperature, top_k, top_p, seed)
        if (model is None) == (not join):
            raise UserError("Tell which model: --model DIRECTORY of an export, or --join ADDRESS of a run.")
        text = _prompt(prompt)
        if model is not None:
            _generate_here(model, text, decoding)
            return
    except NolocoError as error:
        fail(error)
    run_async(_generate_there(join or [], text, decoding, tokenizer))


def _prompt(argument: str | None) -> str:
    if argument is not None and argument != "-":
        return argument
    if sys.stdin.isatty():
        raise UserError('Give the text to go on with: noloco generate "Once upon a time" …, or on stdin.')
    return sys.stdin.buffer.read().decode("utf-8", errors="replace")


def _generate_here(directory: Path, prompt: str, decoding: Decoding) -> None:
    loaded = load_exported(directory)
    ids = first_tokens(loaded.tokenizer, prompt, loaded.context)
    stream = TextStream(loaded.tokenizer, _write)
    generate_tokens(loaded, ids, decoding, stream.put)
    _end(stream, len(ids), loaded.context, decoding)


async def _generate_there(join: list[str], prompt: str, decoding: Decoding, own: str) -> None:
    async with visit(join) as observer:
        tokenizer = transformers_tokenizer(observer.manifest, await tokenizer_file(observer, own))
        context = observer.manifest.data.sequence_tokens
        ids = first_tokens(tokenizer, prompt, context)
        answer = SwarmAnswer(observer, (await observer.routes())[0], _note)
        stream = TextStream(tokenizer, _write)
        async for token in answer.tokens(ids, decoding, tokenizer.eos_token_id):
            stream.put(token)
        _end(stream, len(ids), context, decoding)


def first_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str, context: int) -> list[int]:
    """The prompt's tokens; for an empty one the token that texts begin with.

    Raises `DataError` when the context leaves no room for an answer.
    """
    ids = ids_of(tokenizer, prompt)
    if not ids and tokenizer.bos_token_id is not None:
        ids = [int(tokenizer.bos_token_id)]
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
    sys.stdout.write(text)
    sys.stdout.flush()


def _note(sentence: str) -> None:
    print(f"\n{sentence}", file=sys.stderr, flush=True)
