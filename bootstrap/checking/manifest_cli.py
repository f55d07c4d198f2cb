"""`noloco manifest check`: whether a manifest can be used, and what a run by it would need."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from pydantic import ValidationError

from bootstrap.checking.devices import measured_here, named
from bootstrap.model_options import AccessToken
from node.command import App, doing, fail, run_async
from node.machine.devices import DEVICES, Device
from node.machine.limits import parse_rate
from node.machine.named import Use
from node.watch.words import print_wrapped
from protocol.errors import NO, ManifestError, UserError
from protocol.run.manifest import PRESETS, Manifest, load_preset
from protocol.run.manifest_advice import advice
from protocol.run.signed_manifest import load_manifest

if TYPE_CHECKING:  # torch, which whoever asks for --help need not wait for
    from bootstrap.checking.costs import Prices
    from bootstrap.checking.report import AssumedLinks
    from bootstrap.checking.this_machine import NamedLinks

app = App(no_args_is_help=True)

NAME_ONE = (
    f"Name either a manifest file or a preset: --preset {' | '.join(PRESETS)}. Or a run: --join ADDRESS."
)


@app.callback()
def manifest() -> None:
    """Look at a run's manifest before founding it.

    Example: noloco manifest check my-run.toml
    """


@app.command()
def check(
    file: Annotated[Path | None, Use.READ_FILE, typer.Argument(help="Your own manifest (TOML).")] = None,
    preset: Annotated[str | None, typer.Option(help=f"One of: {', '.join(PRESETS)}.")] = None,
    replicas: Annotated[int, typer.Option(min=1, max=1_000_000, help="Replicas per stage.")] = 8,
    mbit: Annotated[float, typer.Option(min=0.001, help="A volunteer's link in Mbit/s, each way.")] = 100.0,
    uplink: Annotated[str, typer.Option(help="What one can send, as 40Mbit; default: --mbit.")] = "",
    downlink: Annotated[str, typer.Option(help="What a volunteer can receive; default: --mbit.")] = "",
    latency_ms: Annotated[float, typer.Option(min=0, help="One-way latency in milliseconds.")] = 50.0,
    device: Annotated[
        str,
        typer.Option(help=f"Speed and cost with these, as a100,4090. Known: {', '.join(DEVICES)}."),
    ] = "",
    price: Annotated[float, typer.Option(min=0, help="Of one device for an hour, in your currency.")] = 0.0,
    watts: Annotated[float, typer.Option(min=0, help="Of one machine; 0: its device's own.")] = 0.0,
    kwh_price: Annotated[float, typer.Option(min=0, help="Of a kilowatt hour.")] = 0.0,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also measure this machine, as it is now.")
    ] = False,
    threads: Annotated[int, typer.Option(min=0, help="Of what is measured; 0: as a node's.")] = 0,
    join: Annotated[
        list[str] | None, typer.Option(help="This machine for a run: a member's address.")
    ] = None,
    token: AccessToken = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Check a manifest, and show what a run by it takes.

    In memory, bytes, hours, power and money.

    Ends with code 2 and a line for each problem when the manifest cannot be used.

    Example: noloco manifest check --preset llama-125m --device 4090 --uplink 100Mbit --kwh-price 0.3
    """
    try:
        devices = named(device)
        if (file is not None) + (preset is not None) + bool(join) != 1:
            raise UserError(NAME_ONE)
        upload, download = (rate_of(text, mbit) for text in (uplink, downlink))
        doing("Working out what this machine can do" if join else "Working out what the run takes")
        if join:
            from bootstrap.checking.this_machine import NamedLinks

            named_links = NamedLinks(
                upload if uplink else None, download if downlink else None, mbit * 1.25e5
            )
            return check_here(join, token, named_links, threads, watts, as_json)
        chosen = load_manifest(file) if file is not None else load_preset(preset or "")
    except ManifestError as error:
        refuse((file and problems_in(file)) or [str(error)], file, as_json)
    except UserError as error:
        fail(error)
    from bootstrap.checking.costs import Prices
    from bootstrap.checking.report import AssumedLinks

    links = AssumedLinks.between(upload, download, latency_ms / 1000)
    all_devices = [*devices, *([measured_here(chosen, threads)] if measure else [])]
    show_check(chosen, all_devices, links, replicas, Prices(price, kwh_price, watts), as_json)


def show_check(
    chosen: Manifest,
    devices: Sequence[Device],
    links: AssumedLinks,
    replicas: int,
    prices: Prices,
    as_json: bool,
) -> None:
    """Show what a run by the manifest takes, and what it costs with such devices."""
    from bootstrap.checking.costs import cost_of
    from bootstrap.checking.fitting import verdict
    from bootstrap.checking.report import report_of, report_on

    report = report_on(chosen, replicas, links)
    first = verdict(chosen, devices, links, replicas)
    speeds = [report_of(chosen, each) for each in devices]
    costs = [cost_of(chosen, each, links, replicas, prices) for each in devices]
    if as_json:
        told = [
            asdict(speed) | {"cost": cost and asdict(cost)} for speed, cost in zip(speeds, costs, strict=True)
        ]
        found = asdict(report) | {"devices": told}
        print(json.dumps({"check": "manifest", "ok": True, "verdict": first, **found}, indent=2))
        return
    from bootstrap.checking.cost_tables import show_costs
    from bootstrap.checking.tables import show_report

    show_report(first, report, chosen, links)
    show_costs(speeds, costs, replicas)


def check_here(
    join: Sequence[str], token: str, links: NamedLinks, threads: int, watts: float, as_json: bool
) -> None:
    """Show what this machine could serve in the run; ends with code 1 when that is nothing."""
    from bootstrap.checking.machine_tables import show_machine

    if not run_async(show_machine(join, token, links, threads, watts, as_json)):
        sys.exit(NO)


def rate_of(text: str, mbit: float) -> float:
    """Bytes per second; `mbit` where the text is empty. Raises `UserError`."""
    try:
        return parse_rate(text) if text else mbit * 1.25e5
    except ValueError as error:
        raise UserError(f"A link's speed cannot be used: {error}.") from None


def refuse(problems: list[str], file: Path | None, as_json: bool) -> NoReturn:
    if as_json:
        print(json.dumps({"check": "manifest", "ok": False, "problems": problems}, indent=2))
    if file is not None and len(problems) > 1:
        print_wrapped(f"error: {file} has {len(problems)} problems:", on_error=True)
    for problem in problems:
        print_wrapped(f"error: {problem}", on_error=True)
    sys.exit(ManifestError.exit_code)


def problems_in(file: Path) -> list[str]:
    """A line for each setting of a readable TOML file that cannot be used: its place, and what to do."""
    try:
        Manifest.model_validate(tomllib.loads(file.read_text(encoding="utf-8-sig")))
    except ValidationError as error:
        told = [advice(problem, Manifest) for problem in error.errors()]
        return [line if line.endswith(("?", ".")) else f"{line}." for line in told]
    except (OSError, ValueError):
        pass  # not readable, or not TOML: load_toml has said so
    return []
