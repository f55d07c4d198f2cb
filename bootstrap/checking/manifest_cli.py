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

from bootstrap.checking.devices import DEVICES, measured_here, named
from node.command import fail
from protocol.errors import ManifestError, UserError
from protocol.manifest import PRESETS, Manifest, load_preset, load_toml

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def manifest() -> None:
    """Look at a run's manifest before founding it."""


@app.command()
def check(
    file: Annotated[Path | None, typer.Argument(help="Your own manifest (TOML).")] = None,
    preset: Annotated[str | None, typer.Option(help=f"One of: {', '.join(PRESETS)}.")] = None,
    replicas: Annotated[int, typer.Option(min=1, max=1_000_000, help="Replicas per stage.")] = 8,
    mbit: Annotated[float, typer.Option(min=0.001, help="A volunteer's link in Mbit/s, each way.")] = 100.0,
    latency_ms: Annotated[float, typer.Option(min=0, help="One-way latency in milliseconds.")] = 50.0,
    device: Annotated[
        str, typer.Option(help=f"Expected speed of these, as a100,4090. Known: {', '.join(DEVICES)}.")
    ] = "",
    measure: Annotated[bool, typer.Option("--measure", help="Also measure this machine.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Check a manifest, and show the memory, the bytes and the seconds that its run takes.

    Ends with code 2 and a line for each problem when the manifest cannot be used.
    """
    try:
        devices = named(device)
        if (file is None) == (preset is None):
            raise UserError(f"Name either a manifest file or a preset: --preset {' | '.join(PRESETS)}.")
        chosen = load_toml(file) if file is not None else load_preset(preset or "")
    except ManifestError as error:
        refuse((file and problems_in(file)) or [str(error)], file, as_json)
    except UserError as error:
        fail(error)
    from bootstrap.checking.report import AssumedLinks, report_of, report_on

    links = AssumedLinks(mbit, latency_ms / 1000)
    report = report_on(chosen, replicas, links)
    speeds = [report_of(chosen, each) for each in [*devices, *([measured_here(chosen)] if measure else [])]]
    if as_json:
        found = asdict(report) | {"devices": [asdict(speed) for speed in speeds]}
        print(json.dumps({"check": "manifest", "ok": True, **found}, indent=2))
        return
    from bootstrap.checking.tables import show_report

    show_report(report, chosen, links, speeds)


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
