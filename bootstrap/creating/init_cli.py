"""`noloco-bootstrap init`: a commented manifest from a few questions, or from flags."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bootstrap.creating.manifest_writer import toml_of
from node.command import fail
from protocol.errors import ManifestError, NolocoError, UserError
from protocol.manifest import PRESETS, Manifest, load_preset, manifest_from

# flag: where it goes in the manifest, and the question; those without one are asked of nobody
QUESTIONS = {
    "name": ("name", "Name of the run"),
    "stages": ("stages", "Pipeline stages"),
    "hidden": ("model.hidden_size", ""),
    "layers": ("model.layers", ""),
    "heads": ("model.heads", ""),
    "kv_heads": ("model.kv_heads", ""),
    "intermediate": ("model.intermediate_size", ""),
    "vocab": ("model.vocab_size", ""),
    "source": ("data.source", "Text: python-stdlib, or local (each volunteer's own)"),
    "sequence_tokens": ("data.sequence_tokens", "Tokens in a sequence"),
    "sequences": ("inner.sequences", "Sequences in a microbatch"),
    "microbatches": ("inner.microbatches", "Microbatches in an inner step"),
    "steps": ("inner.total_steps", "Inner steps in all"),
    "learning_rate": ("inner.learning_rate", ""),
    "inner_steps": ("outer.inner_steps", "Inner steps between two averagings"),
}


def init(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("run.toml"),
    size: Annotated[str | None, typer.Option(help=f"Start from: {', '.join(PRESETS)}.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    stages: Annotated[int | None, typer.Option(help="Number of pipeline stages.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden size of the model.")] = None,
    layers: Annotated[int | None, typer.Option(help="Number of decoder layers.")] = None,
    heads: Annotated[int | None, typer.Option(help="Number of attention heads.")] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="Number of key/value heads; 0 means as many as --heads.")
    ] = None,
    intermediate: Annotated[int | None, typer.Option(help="Width of the MLP; default: 4 × --hidden.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Vocabulary size.")] = None,
    source: Annotated[str | None, typer.Option(help="Source of the text: python-stdlib or local.")] = None,
    sequence_tokens: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    sequences: Annotated[int | None, typer.Option(help="Sequences per microbatch.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Microbatches per inner step.")] = None,
    steps: Annotated[int | None, typer.Option(help="Total number of inner steps.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    inner_steps: Annotated[
        int | None, typer.Option(help="Inner steps between two gossip averagings.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask any questions.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a manifest with comments, from a few questions or from flags, to be found with --manifest."""
    given = {flag: value for flag, value in locals().items() if flag in QUESTIONS and value is not None}
    try:
        if file.exists() and not force:
            raise UserError(f"{file} is there already. Choose another file, or replace it with --force.")
        if not yes and not sys.stdin.isatty():
            raise UserError("Nobody can be asked here: give what you want as flags, and --yes for the rest.")
        base = load_preset(size or ("tiny" if yes else typer.prompt("Size of the model", default="tiny")))
        if not yes:
            given |= _asked(base, given)
        write(file, changed(base, given))
    except NolocoError as error:
        fail(error)
    print(f"Wrote {file}. Look at it: noloco manifest check {file}")
    print(f"Found the run: noloco-bootstrap --manifest {file}")


def _asked(base: Manifest, given: dict[str, Any]) -> dict[str, Any]:
    """Answers to the questions that no flag answers; Enter keeps what the size has."""
    settings = base.model_dump()
    answers: dict[str, Any] = {}
    for flag, (place, question) in QUESTIONS.items():
        if question and flag not in given:
            default = _at(settings, place)
            answers[flag] = typer.prompt(question, default=default, type=type(default))
    return answers


def changed(base: Manifest, given: dict[str, Any]) -> Manifest:
    """`base` with what was asked for, and what follows from it. Raises `ManifestError` naming each bad setting."""
    settings = base.model_dump()
    for flag, value in given.items():
        section, _, name = QUESTIONS[flag][0].rpartition(".")
        (settings[section] if section else settings)[name] = value
    inner = settings["inner"]
    if "hidden" in given and "intermediate" not in given:
        settings["model"]["intermediate_size"] = 4 * given["hidden"]
    if "steps" in given:
        inner["warmup_steps"] = min(inner["warmup_steps"], given["steps"] // 10)
    if "learning_rate" in given:
        inner["min_learning_rate"] = given["learning_rate"] / 10
    return manifest_from(settings)


def write(file: Path, manifest: Manifest) -> None:
    """Raises `ManifestError` when the file cannot be written."""
    try:
        file.write_text(toml_of(manifest, str(file)), encoding="utf-8")
    except OSError as error:
        raise ManifestError(f"Cannot write {file} ({error.strerror}). Choose another file.") from None


def _at(settings: dict[str, Any], place: str) -> Any:
    section, _, name = place.rpartition(".")
    return (settings[section] if section else settings)[name]
