"""`noloco eval`: loss, perplexity and bits per byte, of an export or of a running swarm."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from transformers import PreTrainedTokenizerBase

from bootstrap.bars import bars
from bootstrap.evaluation import evaluate_route, model_loss
from bootstrap.export.exporting import FACTS
from bootstrap.export.tokenizer import run_tokenizer
from bootstrap.generation.exported import load_exported
from bootstrap.measured_text import MeasuredText, held_out_text, text_of_files
from bootstrap.model_options import Join, ModelDirectory, TokenizerFile, raw_tokenizer
from bootstrap.observer import visit
from node.command import fail, run_async
from node.data.corpus import files_of, load_corpus
from protocol.errors import DataError, ManifestError, NolocoError, UserError
from protocol.manifest import Manifest, manifest_from

HELD_OUT_SEQUENCES = 256
AT_ONCE = 8  # sequences that an export computes together


def evaluate(
    model: ModelDirectory = None,
    join: Join = None,
    data: Annotated[
        list[str] | None, typer.Option(help="Text files or globs; default: what the run holds out.")
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Of --data only what the run holds out of it.")
    ] = False,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="At most so many; default: 256 held-out ones, all of files.")
    ] = None,
    every_replica: Annotated[
        bool, typer.Option("--every-replica", help="Measure each replica, not one of each stage.")
    ] = False,
    tokenizer: TokenizerFile = None,
) -> None:
    """Measure loss, perplexity and bits per byte, of an export or of a running swarm."""
    if (model is None) == (not join):
        fail(UserError("Tell which model: --model DIRECTORY of an export, or --join ADDRESS of a run."))
    if model is None:
        run_async(_evaluate_there(join or [], data or [], held_out, sequences, every_replica, tokenizer))
        return
    try:
        _evaluate_here(model, data or [], held_out, sequences)
    except NolocoError as error:
        fail(error)


async def _evaluate_there(
    join: list[str],
    data: list[str],
    held_out: bool,
    sequences: int | None,
    every_replica: bool,
    place: str | None,
) -> None:
    async with visit(join) as observer:
        manifest = observer.manifest
        tokenizer = run_tokenizer(manifest, await raw_tokenizer(observer, place))
        text = _text(manifest, tokenizer, data, held_out, sequences)
        routes = await observer.routes()
        losses = []
        for route in routes if every_replica else routes[:1]:
            with bars() as shown:
                loss = await evaluate_route(
                    observer, text, route, lambda done, total: shown.update("Evaluating", done, total)
                )
            print(f"{loss}, through {_short(route)}")
            losses.append(loss.nats)
        if len(losses) > 1:
            print(f"{sum(losses) / len(losses):.4f} nats per token, mean over {len(losses)} routes")


def _evaluate_here(directory: Path, data: list[str], held_out: bool, sequences: int | None) -> None:
    loaded = load_exported(directory)
    if data and not held_out:
        text = text_of_files(_files(data), loaded.tokenizer, loaded.context, AT_ONCE, sequences)
    else:
        text = _text(_manifest_of(directory), loaded.tokenizer, data, held_out, sequences)
    with bars() as shown:
        loss = model_loss(loaded.model, text, lambda done, total: shown.update("Evaluating", done, total))
    print(f"{loss}, by {directory}")


def _text(
    manifest: Manifest,
    tokenizer: PreTrainedTokenizerBase,
    data: list[str],
    held_out: bool,
    sequences: int | None,
) -> MeasuredText:
    """What to measure on. Raises `DataError` with what to do where there is nothing."""
    if data and not held_out:
        return text_of_files(
            _files(data), tokenizer, manifest.data.sequence_tokens, manifest.inner.sequences, sequences
        )
    if not data and manifest.data.source == "local":
        raise DataError(
            "This run trains on its volunteers' own text: name some with --data FILE, with --held-out for the part "
            "of it that nobody trains on."
        )
    corpus = load_corpus(data or manifest.data.source, manifest.data.held_out)
    return held_out_text(manifest, corpus, sequences or HELD_OUT_SEQUENCES, tokenizer)


def _files(data: list[str]) -> list[Path]:
    return list(dict.fromkeys(path for entry in data for path in files_of(entry)))


def _manifest_of(directory: Path) -> Manifest:
    """The run's, as the export tells it."""
    try:
        return manifest_from(json.loads((directory / FACTS).read_text(encoding="utf-8"))["manifest"])
    except (OSError, ValueError, KeyError, TypeError, ManifestError):
        raise DataError(
            f"{directory} does not tell which text its run holds out. Name text with --data FILE."
        ) from None


def _short(route: Sequence[str]) -> str:
    return " → ".join(peer[-8:] for peer in route)
