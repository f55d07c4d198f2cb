"""`noloco manifest check`: whether a manifest can be used, and what a run by it would need."""

from __future__ import annotations

import difflib
import json
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bootstrap.devices import DEVICES, EFFICIENCY, measured_here, named, report_of
from bootstrap.manifest_memory import device_table, memory_table
from bootstrap.manifest_report import TOLERABLE, Hop, Links, Report, report_on
from node.command import fail
from node.machine.limits import size
from node.model.footprint import backward_bytes, forward_bytes
from protocol.errors import ManifestError, UserError
from protocol.manifest import PRESETS, Manifest, load_preset, load_toml

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def manifest() -> None:
    """Look at a run's manifest before founding it."""


@app.command()
def check(
    file: Annotated[Path | None, typer.Argument(help="A manifest of your own (TOML).")] = None,
    preset: Annotated[str | None, typer.Option(help=f"One of: {', '.join(PRESETS)}.")] = None,
    replicas: Annotated[int, typer.Option(min=1, max=1_000_000, help="Replicas of each stage.")] = 8,
    mbit: Annotated[
        float, typer.Option(min=0.001, help="Of a volunteer's link, each way, per second.")
    ] = 100.0,
    latency_ms: Annotated[float, typer.Option(min=0, help="Of a message, one way.")] = 50.0,
    device: Annotated[
        str, typer.Option(help=f"Expected speed of these, as a100,4090. Known: {', '.join(DEVICES)}.")
    ] = "",
    measure: Annotated[bool, typer.Option("--measure", help="And of this machine, measured.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the tables.")] = False,
) -> None:
    """Check a manifest, and show the memory, the bytes and the seconds that a run by it takes.

    Ends with code 2 and a line for each problem when the manifest cannot be used.
    """
    try:
        devices = named(device)
        chosen = chosen_for_check(file, preset)
    except ManifestError as error:
        refuse((file and problems_in(file)) or [str(error)], file, as_json)
    except UserError as error:
        fail(error)
    links = Links(mbit, latency_ms / 1000)
    report = report_on(chosen, replicas, links)
    speeds = [report_of(chosen, each) for each in [*devices, *([measured_here(chosen)] if measure else [])]]
    if as_json:
        found = asdict(report) | {"devices": [asdict(speed) for speed in speeds]}
        print(json.dumps({"check": "manifest", "ok": True, **found}, indent=2))
        return
    memory = memory_table([stage.memory_parts for stage in report.stages])
    tables = [stage_table(report), "", memory, *(["", device_table(speeds)] if speeds else [])]
    said = sentences(report, chosen, links) | (speed_of_devices() if speeds else {})
    Console().print(*tables, "", sentence_grid(said), sep="\n", highlight=False)


def chosen_for_check(file: Path | None, preset: str | None) -> Manifest:
    """The one manifest that was named. Raises `ManifestError`, or `UserError` for none or two."""
    if (file is None) == (preset is None):
        raise UserError(f"Name either a manifest file or a preset: --preset {' | '.join(PRESETS)}.")
    return load_toml(file) if file is not None else load_preset(preset or "")


def refuse(problems: list[str], file: Path | None, as_json: bool) -> NoReturn:
    if as_json:
        print(json.dumps({"check": "manifest", "ok": False, "problems": problems}, indent=2))
    if file is not None and len(problems) > 1:
        print(f"error: {file} has {len(problems)} problems:", file=sys.stderr)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    sys.exit(ManifestError.exit_code)


def problems_in(file: Path) -> list[str]:
    """A line for each setting of a readable TOML file that cannot be used: its place, and what to do."""
    try:
        Manifest.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except ValidationError as error:
        return [advice(problem["loc"], problem["type"], problem["msg"]) for problem in error.errors()]
    except (OSError, ValueError):
        pass  # not readable, or not TOML: load_toml has said so
    return []


def advice(place: tuple[int | str, ...], kind: str, message: str) -> str:
    """One of pydantic's findings as a sentence about the setting at `place`."""
    setting = ".".join(str(part) for part in place)
    if kind == "missing":
        return f"{setting} is missing: add it."
    if kind == "extra_forbidden":
        known = _settings_beside(place)
        close = difflib.get_close_matches(str(place[-1]), known, n=1, cutoff=0.7)
        meant = f'Did you mean "{close[0]}"?' if close else f"Known here: {', '.join(known)}."
        return f"{setting} is not a setting: remove it or correct its name. {meant}"
    told = message.removeprefix("Value error, ").replace("Input should", "it should")
    # what our own validators say names the setting already
    return told if kind == "value_error" else f"{setting} cannot be used: {told}."


def _settings_beside(place: tuple[int | str, ...]) -> list[str]:
    section: type[BaseModel] = Manifest
    for part in place[:-1]:
        kind = section.model_fields[str(part)].annotation
        section = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else Manifest
    return list(section.model_fields)


def stage_table(report: Report) -> Table:
    """One row for each stage: what one replica of it needs."""
    table = Table(
        title=f"{report.name}: {report.parameters:,} parameters in {len(report.stages)} "
        f"stage{'s' * (len(report.stages) > 1)}; one of {report.replicas} replicas:",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        header_style="underline",
    )
    headings = (
        "stage",
        "layers",
        "parameters",
        "memory",
        "sent in\na round",
        "bytes/\ntoken",
        "waits",
        "all-reduce,\nbytes/token",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for stage in report.stages:
        table.add_row(
            str(stage.stage),
            str(stage.layers),
            _count(stage.parameters),
            size(stage.memory),
            size(round(stage.round.sent)),
            _short(stage.round.per_token),
            duration(stage.round.seconds),
            _short(stage.all_reduce.per_token),
        )
    return table


def sentences(report: Report, manifest: Manifest, links: Links) -> dict[str, str]:
    """What the table does not say, by its subject."""
    outer = manifest.outer
    worst = max(report.stages, key=lambda stage: stage.round.seconds)
    where = f"at {links.mbit:g} Mbit/s and {links.latency * 1000:g} ms one way"
    said = {
        "round": f"{outer.inner_steps} inner steps of {report.tokens_per_step:,} tokens: "
        f"{report.tokens_per_round:,} tokens a replica.",
        "averaging": _averaging(report, manifest),
    }
    if worst.round.seconds:
        said["waiting"] = (
            f"{duration(worst.round.seconds)} a round {where}; less than {TOLERABLE:.0%} of the time if an inner "
            f"step takes {duration(report.least_step_seconds)} or more."
        )
    elif worst.round.sent:
        said["waiting"] = (
            f"none: {size(round(worst.round.sent))} travel while training goes on, "
            f"{duration(links.seconds(worst.round.sent))} {where}."
        )
    if worst.all_reduce.seconds:
        said["all-reduce"] = (
            f"of float32 gradients in every inner step instead: {duration(worst.all_reduce.seconds)} a step, "
            f"{duration(worst.all_reduce.seconds * outer.inner_steps)} a round."
        )
    if report.hop is not None:
        said["pipeline"] = _pipeline(report.hop, report, manifest)
    said["memory"] = (
        "by formula, beside about 0.6 GiB of the program; a node measures before it serves, and gets by with "
        'anything from "together" down to "at least".'
    )
    said["stability"] = _stability(report)
    if report.notes:
        said["note"] = "\n".join(report.notes)
    if report.study:
        said["study"] = report.study
    return said


def speed_of_devices() -> dict[str, str]:
    return {
        "devices": f"published bf16 arithmetic, of which {EFFICIENCY:.0%} is assumed to be reached, with kernels of "
        "5 µs at least (assumed), and memory bandwidth in the optimizer's step; no waiting for links. *: in smaller "
        "steps, which is slower (docs/memory.md). --measure measures this machine."
    }


def sentence_grid(said: dict[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    for subject, text in said.items():
        grid.add_row(subject, Text(text))
    return grid


def _pipeline(hop: Hop, report: Report, manifest: Manifest) -> str:
    wire, forward, back = manifest.wire, forward_bytes(manifest), backward_bytes(manifest)
    microbatches = report.tokens_per_round // manifest.tokens_per_microbatch
    return (
        f"{_short(hop.forward)} bytes a token and hop forward ({wire.activations}, labels included), "
        f"{_short(hop.back)} back ({wire.gradients}); {duration(hop.seconds)} a hop and microbatch. A microbatch "
        f"of {manifest.inner.sequences} × {manifest.data.sequence_tokens:,} tokens is {size(forward)} forward and "
        f"{size(back)} back, the {microbatches:,} of a round {size(microbatches * (forward + back))}."
    )


def _averaging(report: Report, manifest: Manifest) -> str:
    outer, wire = manifest.outer, manifest.wire
    if outer.method == "local":
        return "never (outer.method local)."
    if outer.method == "diloco":
        share = 2 * (report.replicas - 1) / report.replicas
        return f"over all replicas: {share:.2f} states ({wire.gossip}) out and as many in, each round."
    what = {
        "none": f"one state ({wire.gossip}) out and one in, each round",
        "phi-early": f"φ ({wire.gossip}) during the round and Δ ({wire.progress}) at its end, out and in",
        "late": f"one state ({wire.gossip}) out and one in, while the next round has begun",
    }[outer.overlap]
    return f"with one random partner: {what}; a small sample of φ goes along."


def _stability(report: Report) -> str:
    found = report.stability
    if found is None:
        return "nothing holds the replicas together."
    line = f"γ {found.gamma:g} is at {found.gamma / found.bound:.0%} of its bound {found.bound:.3g}. "
    if found.spread == 0:
        return line + "Replicas stay equal."
    return line + (
        f"{report.replicas} replicas settle {found.spread:.3f} times s apart (standard deviations; s: of the noise "
        "that a round adds to each by itself, which goes with the learning rate)."
    )


def duration(seconds: float) -> str:
    """For people: "0.3 s", "4.2 min", "1.5 h"; "-" for none."""
    if seconds == 0:
        return "-"
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _count(number: int) -> str:
    return f"{number / 1e6:,.1f} M" if number >= 1e7 else f"{number:,}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"
