"""`noloco simulate`: what a setting would do, before anybody starts a node."""

from __future__ import annotations

import inspect
import logging
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer
from typer import Argument, Option

from bootstrap.model_options import OwnManifest, PresetToTrain
from node.command import App, doing, fail
from node.machine.cores import cores
from node.machine.named import Use
from node.watch.events import set_up_logging
from node.watch.words import print_wrapped
from protocol.errors import ManifestError, NolocoError
from protocol.run.manifest import BoundaryCodec

CORES = cores()
MOST_ATTACKERS = 0.5  # of a stage: of more, the others would be the odd ones

app = App(no_args_is_help=True)


@app.callback()
def simulate() -> None:
    """Simulate a setting before anybody starts a node.

    Example: noloco simulate learning --method noloco,diloco
    """
    set_up_logging(verbose=False, least=logging.ERROR)  # the nodes' lines would hide the outcomes


@dataclass(frozen=True)
class LearningOptions:
    """The options of `noloco simulate learning`. Those that are texts take lists, such as 4,8."""

    preset: PresetToTrain = None
    manifest: OwnManifest = None
    data: Annotated[
        list[str] | None, Use.TEXT, Option(help="Other text: files or globs, hub:NAME; repeatable.")
    ] = None
    method: Annotated[str, Option(metavar="LIST", help="noloco, diloco, average, local, all-reduce.")] = (
        "noloco"
    )
    replicas: Annotated[str, Option(metavar="LIST", help="Replicas per stage.")] = "4"
    stages: Annotated[str, Option(metavar="LIST", help="Number of pipeline stages.")] = "2"
    routing: Annotated[str, Option(metavar="LIST", help="random or fixed.")] = "random"
    inner_steps: Annotated[str | None, Option("-k", metavar="LIST", help="Inner steps per round.")] = None
    alpha: Annotated[str | None, Option(metavar="LIST", help="Outer momentum.")] = None
    beta: Annotated[str | None, Option(metavar="LIST", help="Gain on the pair's progress.")] = None
    gamma: Annotated[str | None, Option(metavar="LIST", help="Pull toward the pair's mean.")] = None
    overlap: Annotated[str | None, Option(metavar="LIST", help="none or phi-early.")] = None
    staleness: Annotated[str | None, Option(metavar="LIST", help="Of the pipeline: 0 or 1 inner steps.")] = (
        None
    )
    wire: Annotated[
        str | None, Option("--codecs", metavar="LIST", help="Of activations/gradients, as int8/bf16.")
    ] = None
    chosen: Annotated[
        list[str] | None, Option("--set", help="Any setting, as outer.clip=0,1.5; repeatable.")
    ] = None
    steps: Annotated[int, Option(metavar="N", min=1, help="Inner steps in all.")] = 1000
    microbatches: Annotated[int, Option(metavar="N", min=1, help="Microbatches per inner step.")] = 1
    sequences: Annotated[int, Option(metavar="N", min=1, help="Sequences per microbatch.")] = 2
    slow: Annotated[str, Option(metavar="LIST", help="Slow one last-stage replica down.")] = "1"
    latency: Annotated[str, Option(metavar="LIST", help="One-way latency of links in ms.")] = "0"
    mbit: Annotated[str, Option(metavar="LIST", help="Uplinks in Mbit/s; 0: no limit.")] = "0"
    seed: Annotated[str, Option("--seeds", metavar="LIST", help="Of data and weights.")] = "0,1,2"
    validation_sequences: Annotated[int, Option(metavar="N", min=1, help="Held-out sequences.")] = 512
    device: Annotated[str, Option(help="Torch's, of all nodes, as cuda:1.")] = "cpu"
    jobs: Annotated[int, Option(metavar="N", min=1, help="Runs at a time.")] = CORES
    results: Annotated[Path | None, Use.WRITE_FILE, Option(help="File for results, to resume from.")] = None
    plot: Annotated[Path | None, Use.WRITE_FILE, Option(help="Plot loss and spread to this SVG file.")] = None
    same_bytes: Annotated[bool, Option("--same-bytes", help="Also compare at equal bytes.")] = False
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of a table.")] = False


@app.command()
def learning(**given: Any) -> None:
    """Show how well a setting learns, all replicas in one process.

    LIST, such as 4,8, is tried in every combination.

    Example: noloco simulate learning --method noloco,diloco -k 5,25
    """
    options = LearningOptions(**given)
    doing("Loading torch to simulate")
    from bootstrap.creating.choosing import RunOptions
    from bootstrap.lab.simulation.study import one_setting, run_and_show
    from node.process.serving import choose_device

    try:
        base, _ = RunOptions(options.preset, options.manifest).resolved()
        asked = {name: getattr(options, name) for name in READERS}
        lists = {name: READERS[name](text) for name, text in asked.items() if text is not None}
        lists.setdefault("staleness", [base.inner.staleness])
        lists["chosen"] = changes(options.chosen or [])
        settings = [
            one_setting(
                base, options.steps, options.microbatches, options.sequences,
                validation_sequences=options.validation_sequences, **dict(zip(lists, values, strict=True)),
            )
            for values in product(*lists.values())
        ]  # fmt: skip
        device = choose_device(options.device)
        texts = tuple(options.data or ())
        settings = [replace(setting, device=device, texts=texts) for setting in settings]
        run_and_show(
            settings, options.results, options.jobs, options.plot, options.as_json, options.same_bytes
        )
    except NolocoError as error:
        fail(error)


learning.__dict__["__signature__"] = inspect.signature(
    LearningOptions, eval_str=True
)  # of which typer makes options


@app.command("attacks")
def simulate_attacks(
    kinds: Annotated[str, Option(metavar="LIST", help="Of attackers; default: each.")] = "",
    shares: Annotated[str, Option(metavar="LIST", help="Attackers' part of a stage.")] = "0.1,0.2",
    preset: PresetToTrain = None,
    manifest: OwnManifest = None,
    replicas: Annotated[int, Option(metavar="N", min=1, help="Replicas per stage.")] = 8,
    stages: Annotated[int, Option(metavar="N", min=2, help="Pipeline stages.")] = 2,
    chosen: Annotated[
        list[str] | None, Option("--set", help="Any setting, as outer.clip=0; repeatable.")
    ] = None,
    steps: Annotated[int, Option(metavar="N", min=1, help="Inner steps in all.")] = 300,
    seeds: Annotated[str, Option(metavar="LIST", help="Of data and weights.")] = "0,1,2",
    jobs: Annotated[int, Option(metavar="N", min=1, help="Runs at a time.")] = CORES,
    results: Annotated[Path | None, Use.WRITE_FILE, Option(help="File for results, to resume from.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what peers that do wrong cost, and how soon it is seen.

    Kinds: sign-flip, scaled, inner-product, drift (averages); label-flip, wrong-activations, flooding
    (first stage); wrong-gradients, cached-answers, odd-answers, holding, false-stats (last stage);
    silent, false-records (every stage). A manifest without outer.clip gets 1.5.

    Example: noloco simulate attacks --kinds cached-answers --shares 0.25
    """
    doing("Loading torch to simulate")
    from bootstrap.creating.choosing import RunOptions
    from bootstrap.lab.simulation.attacks import attack_settings, run_and_show_attacks
    from bootstrap.lab.simulation.liars import CLIP, LIES
    from bootstrap.lab.simulation.study import one_setting

    try:
        base, _ = RunOptions(preset, manifest).resolved()
        defended = {"outer.clip": base.outer.clip or CLIP}
        undisturbed = [
            one_setting(base, steps, 1, 2, replicas=replicas, stages=stages, seed=seed, chosen=defended | own)
            for own in changes(chosen or [])
            for seed in numbers("--seeds", seeds, int, 0)
        ]
        attacks = choices("--kinds", kinds, list(LIES)) if kinds else list(LIES)
        parts = numbers("--shares", shares, float, 0)
        if max(parts) > MOST_ATTACKERS:
            raise ManifestError(f"--shares {shares!r}: half of a stage at most, as 0.1,0.5.")
        run_and_show_attacks(list(attack_settings(undisturbed, attacks, parts)), results, jobs, as_json)
    except NolocoError as error:
        fail(error)


@app.command("swarm")
def simulate_peers(
    scenario: Annotated[str, Argument(help="A preset, or a TOML file.", show_default=False)] = "",
    seed: Annotated[int | None, Option(metavar="N", help="Another one than the scenario's.")] = None,
    minutes: Annotated[float | None, Option(metavar="N", min=1, help="Virtual ones, in all.")] = None,
    page: Annotated[
        Path | None, Use.WRITE_FILE, Option(help="Write the report as one HTML page, too.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Simulate up to 10,000 peers that come, go and fail.

    They decide by the daemon's own code. Without a scenario the presets are listed (docs/scaling.md). Exits with 1
    and a sentence when a bound of the report is broken.

    Example: noloco simulate swarm spot-churn
    """
    from bootstrap.lab.simulated_swarm.swarm_scenario import changed, presets_told, read_scenario

    if not scenario:
        print_wrapped(f"Name one, as in: noloco simulate swarm lab-8\n{presets_told()}")
        return
    try:
        chosen = changed(read_scenario(scenario), seed=seed, minutes=minutes)
        doing(f"Simulating {scenario}")
        from bootstrap.lab.simulated_swarm.running_swarm import run_scenario

        code = run_scenario(chosen, as_json, page)
    except NolocoError as error:
        fail(error)
    raise typer.Exit(code)


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


def changes(texts: Sequence[str]) -> list[dict[str, object]]:
    """Every combination of settings as inner.optimizer=adamw,muon. Raises `ManifestError` for what is none."""
    lists: dict[str, list[object]] = {}
    for text in texts:
        name, sign, values = text.partition("=")
        if not name or not sign:
            raise ManifestError(f"--set {text!r}: give a setting and its value, such as outer.clip=1.5.")
        lists[name] = [_value(part) for part in values.split(",")]
    return [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]


def _value(text: str) -> object:
    """A number or truth value as TOML writes it; anything else is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


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
