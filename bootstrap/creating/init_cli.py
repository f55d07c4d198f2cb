"""`noloco init`: a manifest with a comment on every setting, from a few questions or from flags."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bootstrap.creating.asking import Answered, asked, parameters
from bootstrap.display import write_whole
from node.command import fail
from node.machine.named import Use, is_there
from node.watch.words import print_wrapped
from protocol.errors import NolocoError, UserError
from protocol.run.manifest import (
    BYTES,
    PRESETS,
    Manifest,
    as_toml,
    load_preset,
    manifest_from,
)

PLACES = {  # in the manifest, by flag
    "name": "name",
    "stages": "stages",
    "hidden": "model.hidden_size",
    "layers": "model.layers",
    "heads": "model.heads",
    "kv_heads": "model.kv_heads",
    "intermediate": "model.intermediate_size",
    "vocab": "model.vocab_size",
    "source": "data.source",
    "sequence_tokens": "data.sequence_tokens",
    "sequences": "inner.sequences",
    "microbatches": "inner.microbatches",
    "steps": "inner.total_steps",
    "learning_rate": "inner.learning_rate",
    "inner_steps": "outer.inner_steps",
    "private": "access.private",
}
HEAD = """\
# The manifest of one training run. Founding signs it, and from then on it never changes.
#   noloco manifest check {file}              memory, bytes and seconds that a run by it takes
#   noloco found --manifest {file}            found the run
# docs/manifest.md explains every setting.
"""
MEANINGS = {
    "name": "for people",
    "stages": "pipeline stages; the cut makes the slowest as fast as it can be",
    "routing": "each microbatch to a random replica of the next stage",
    "checked": "of them, sent to a second replica to compare the answers",
    "model": "a decoder, in the words of transformers' configurations",
    "model.vocab_size": "at least 256 where bytes are tokens",
    "model.kv_heads": "0: as many as heads",
    "model.head_dim": "0: hidden_size by heads",
    "model.tied_embeddings": "the head multiplies with the embedding's matrix",
    "model.seed": "of the first weights, the same for everyone",
    "data": "what replicas of stage 0 draw sequences from",
    "data.source": '"local": each volunteer of stage 0 names text with --data',
    "data.tokenizer": '"bytes", or the hash that --tokenizer gives',
    "data.sequence_tokens": "in a sequence",
    "data.held_out": "fraction of the documents that nobody trains on",
    "inner": "The inner optimizer, and what one inner step of a replica consumes",
    "inner.learning_rate": "after a linear warm-up; cosine to the minimum at total_steps",
    "inner.microbatches": "in one inner step",
    "inner.sequences": "in one microbatch; a node that cannot hold them computes it in slices",
    "inner.staleness": "1: the next step's forward passes may begin before this one is applied",
    "inner.clock": '"run": the learning rate of all stages goes by the first stage\'s steps',
    "outer": "NoLoCo's averaging with one random partner every inner_steps steps",
    "outer.gamma": "pull between replicas; below 2(1 - alpha^2)",
    "outer.inner_steps": "k, in a round",
    "outer.window": "a round may end this fraction earlier or later, to meet its partner",
    "outer.pace": '"time": as many steps as the median replica does in its k',
    "outer.overlap": '"phi-early": most of the exchange goes while training goes on',
    "outer.clip": "the defence's radius in usual distances; 0 trusts everybody",
    "wire": "how tensors travel: fp32, fp16, bf16, int8; between stages also eden4, eden2",
    "access": "who may enter: everybody, or those with the owner's token (docs/private.md)",
    "limits": "in seconds, where deadlines start before they adapt",
    "limits.record_lifetime": "of a node's record in the DHT",
}
Private = Annotated[
    bool | None,
    typer.Option("--private/--open", help="Who may join: the invited, or anybody.", show_default=False),
]


def init(
    file: Annotated[Path, Use.WRITE_FILE, typer.Argument(help="The file to write.")] = Path("run.toml"),
    size: Annotated[
        str | None, typer.Option("--preset", "--size", help=f"Start from: {', '.join(PRESETS)}.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    stages: Annotated[int | None, typer.Option(help="Number of pipeline stages.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden size of the model.")] = None,
    layers: Annotated[int | None, typer.Option(help="Number of decoder layers.")] = None,
    heads: Annotated[int | None, typer.Option(help="Number of attention heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads; 0 means as many as --heads.")] = None,
    intermediate: Annotated[int | None, typer.Option(help="Width of the MLP; default: 4 × --hidden.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Vocabulary size.")] = None,
    source: Annotated[str | None, typer.Option(help="Source of the text: python-stdlib or local.")] = None,
    sequence_tokens: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    sequences: Annotated[int | None, typer.Option(help="Sequences per microbatch.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Microbatches per inner step.")] = None,
    steps: Annotated[int | None, typer.Option(help="Total number of inner steps.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    inner_steps: Annotated[int | None, typer.Option(help="Inner steps between gossip averagings.")] = None,
    private: Private = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask any questions.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a commented manifest, from a few questions or flags.

    Example: noloco init my-run.toml --preset tiny --stages 4
    """
    given = {flag: value for flag, value in locals().items() if flag in PLACES and value is not None}
    try:
        _require_new(file, force)
        if not yes and not sys.stdin.isatty():
            raise UserError("There is no terminal to ask questions on: give flags, and --yes for the rest.")
        preset = load_preset(size or "tiny")
        run = Answered(changed(preset, given), None, "") if yes else answered(given, size)
        made = _written(run, file, force)
    except NolocoError as error:
        fail(error)
    manifest = run.manifest
    print_wrapped(
        f"Wrote {file}, a model of {parameters(manifest)}. Look at it: noloco manifest check {file}"
    )
    lacks_tokenizer = manifest.data.tokenizer == BYTES and manifest.model.outgrows_bytes
    own = f" --tokenizer {made}" if made else " --tokenizer tokenizer.json (or hub:NAME)" * lacks_tokenizer
    print_wrapped(f"Found the run: noloco found --manifest {file}{own}")
    if manifest.data.source == "local":
        print_wrapped(
            f"Its text is what volunteers bring: whoever serves stage 0 adds --data {run.text or 'FILE'}."
        )


def answered(given: dict[str, object], size: str | None = None) -> Answered:
    """Return the run by questions and flags, which have the last word. Raises `NolocoError`."""
    run = asked(given, size)
    return replace(run, manifest=changed(run.manifest, given))


def _written(run: Answered, file: Path, force: bool) -> Path | None:
    """Write the manifest and, beside it, its tokenizer.json; return where that is."""
    made = None
    if run.tokenizer is not None:
        made = file.with_name(f"{file.stem}-tokenizer.json")
        _require_new(made, force)
        write_whole(made, run.tokenizer, "Choose another file.")
    write_whole(file, toml_of(run.manifest, str(file)), "Choose another file.")
    return made


def _require_new(place: Path, force: bool) -> None:
    if is_there(place) and not force:
        raise UserError(f"{place} exists already. Choose another file, or replace it with --force.")


def changed(base: Manifest, given: dict[str, object]) -> Manifest:
    """`base` with what was asked for, and what follows from it. Raises `ManifestError` naming each bad setting."""
    settings = base.model_dump()
    for flag, value in given.items():
        section, _, name = PLACES[flag].rpartition(".")
        (settings[section] if section else settings)[name] = value
    model, inner = settings["model"], settings["inner"]
    if "hidden" in given and "intermediate" not in given:
        model["intermediate_size"] = 4 * model["hidden_size"]
    if "steps" in given:
        inner["warmup_steps"] = min(inner["warmup_steps"], inner["total_steps"] // 10)
    if "learning_rate" in given:
        inner["min_learning_rate"] = inner["learning_rate"] / 10
    return manifest_from(settings)


def toml_of(manifest: Manifest, file: str) -> str:
    """All settings, defaults included, and what they mean. Reading it gives `manifest` again."""
    lines, section = [HEAD.format(file=file)], ""
    for line in as_toml(manifest).splitlines():
        if line.startswith("["):
            section = line.strip("[]")
            lines += [*([f"# {MEANINGS[section]}"] if section in MEANINGS else []), line]
        else:
            place = ".".join(filter(None, (section, line.partition(" = ")[0])))
            lines.append(f"{line:<32}# {MEANINGS[place]}" if line and place in MEANINGS else line)
    return "\n".join(lines) + "\n"
