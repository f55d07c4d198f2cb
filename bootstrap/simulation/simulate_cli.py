"""`noloco simulate`: what a setting would do, before anybody starts a node."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer
from typer import Option

from bootstrap.model_options import OwnManifest, PresetToTrain
from node.command import fail
from protocol.errors import ManifestError, NolocoError
from protocol.manifest import BoundaryCodec

CORES = os.cpu_count() or 1

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def simulate() -> None:
    """Simulate a setting before anybody starts a node."""


@dataclass(frozen=True)
class LearningOptions:
    """The options of `noloco simulate learning`. Those that are texts take lists, such as 4,8."""

    preset: PresetToTrain = None
    manifest: OwnManifest = None
    method: Annotated[str, Option(help="noloco, diloco, average, local or all-reduce (in every step).")] = (
        "noloco"
    )
    replicas: Annotated[str, Option(help="Replicas per stage.")] = "4"
    stages: Annotated[str, Option(help="Number of pipeline stages.")] = "2"
    routing: Annotated[str, Option(help="Routing between stages: random or fixed.")] = "random"
    inner_steps: Annotated[str | None, Option("-k", help="Inner steps per round.")] = None
    alpha: Annotated[str | None, Option(help="Outer momentum.")] = None
    beta: Annotated[str | None, Option(help="Gain on the pair's progress.")] = None
    gamma: Annotated[str | None, Option(help="Pull toward the pair's mean.")] = None
    overlap: Annotated[str | None, Option(help="Overlap of exchange and training: none or phi-early.")] = None
    staleness: Annotated[str | None, Option(help="Staleness of the pipeline: 0 or 1 inner steps.")] = None
    wire: Annotated[
        str | None, Option("--codecs", help="Codecs of activations/gradients, such as bf16 or int8/bf16.")
    ] = None
    steps: Annotated[int, Option(min=1, help="Inner steps; the learning rate schedule spans them.")] = 1000
    microbatches: Annotated[int, Option(min=1, help="Microbatches per inner step of a replica.")] = 1
    sequences: Annotated[int, Option(min=1, help="Sequences per microbatch.")] = 2
    slow: Annotated[str, Option(help="Slow one last-stage replica down by this factor.")] = "1"
    latency: Annotated[str, Option(help="One-way latency of each link in milliseconds.")] = "0"
    mbit: Annotated[str, Option(help="Bandwidth of each uplink in Mbit/s; 0 means no limit.")] = "0"
    seed: Annotated[str, Option("--seeds", help="Random seeds; each one is a separate run.")] = "0,1,2"
    validation_sequences: Annotated[
        int, Option(min=1, help="Number of held-out sequences to evaluate on.")
    ] = 512
    jobs: Annotated[int, Option(min=1, help="Number of runs at a time, one core each.")] = CORES
    results: Annotated[
        Path | None, Option(help="File to keep results in; an interrupted study resumes from it.")
    ] = None
    plot: Annotated[Path | None, Option(help="Plot loss and spread against tokens to this SVG file.")] = None
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of a table.")] = False


@app.command()
def learning(**given: Any) -> None:
    """Show how well a setting learns: every replica of every stage in one process, no network.

    Options that take a list, such as 4,8, are tried in every combination.
    """
    options = LearningOptions(**given)
    from bootstrap.creating.choosing import RunOptions
    from bootstrap.simulation.study import one_setting, run_and_show

    try:
        base, _ = RunOptions(options.preset, options.manifest).resolved()
        asked = {name: getattr(options, name) for name in READERS}
        lists = {name: READERS[name](text) for name, text in asked.items() if text is not None}
        lists.setdefault("staleness", [base.inner.staleness])
        settings = [
            one_setting(
                base, options.steps, options.microbatches, options.sequences,
                validation_sequences=options.validation_sequences, **dict(zip(lists, values, strict=True)),
            )
            for values in product(*lists.values())
        ]  # fmt: skip
        run_and_show(settings, options.results, options.jobs, options.plot, options.as_json)
    except NolocoError as error:
        fail(error)


learning.__dict__["__signature__"] = inspect.signature(
    LearningOptions, eval_str=True
)  # of which typer makes options


# --- lists as text ------------------------------------------------------------------------------

Number = TypeVar("Number", int, float)


def numbers(option: str, text: str, kind: type[Number], least: float) -> list[Number]:
    """The numbers of a list as 4,8. Raises `ManifestError` that names the option."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or any(not least <= value < 1e9 for value in values):
        what = "whole numbers" if kind is int else "numbers"
        raise ManifestError(f"{option} {text!r}: give {what} of at least {least}, separated by commas.")
    return values


def choices(option: str, text: str, known: Sequence[str]) -> list[str]:
    values = text.split(",")
    for value in values:
        if value not in known:
            raise ManifestError(f"{option} {value!r}: choose from {', '.join(known)}.")
    return values


def wires(option: str, text: str) -> list[dict[str, str]]:
    """The manifest's changes for a list of codecs as fp32,int8/bf16: of both directions, or activations/gradients."""
    result = []
    for part in text.split(","):
        activations, _, gradients = part.partition("/")
        for codec in (activations, gradients or activations):
            choices(option, codec, get_args(BoundaryCodec))
        result.append({"activations": activations, "gradients": gradients or activations})
    return result


READERS: dict[str, Callable[[str], list[Any]]] = {  # of the list that each option takes
    "method": partial(choices, "--method", known=("noloco", "diloco", "average", "local", "all-reduce")),
    "replicas": partial(numbers, "--replicas", kind=int, least=1),
    "stages": partial(numbers, "--stages", kind=int, least=1),
    "routing": partial(choices, "--routing", known=("random", "fixed")),
    "inner_steps": partial(numbers, "-k", kind=int, least=1),
    "alpha": partial(numbers, "--alpha", kind=float, least=0),
    "beta": partial(numbers, "--beta", kind=float, least=0),
    "gamma": partial(numbers, "--gamma", kind=float, least=0),
    "overlap": partial(choices, "--overlap", known=("none", "phi-early")),
    "staleness": partial(numbers, "--staleness", kind=int, least=0),
    "wire": partial(wires, "--codecs"),
    "slow": partial(numbers, "--slow", kind=float, least=1),
    "latency": lambda text: [value / 1000 for value in numbers("--latency", text, float, 0)],
    "mbit": partial(numbers, "--mbit", kind=float, least=0),
    "seed": partial(numbers, "--seeds", kind=int, least=0),
}
