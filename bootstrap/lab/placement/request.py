"""The request to `noloco plan`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from bootstrap.lab.placement import DEFAULT_METHOD, METHOD_NAMES
from node.machine.named import Use
from protocol.errors import UserError


@dataclass(frozen=True)
class PlanRequest:
    """The options of `noloco plan`."""

    scenario: Annotated[
        Path | None, Use.READ_FILE, Option(help="Measured links as JSON (docs/placement.md).")
    ] = None
    join: Annotated[list[str] | None, Option(help="Plan for a running swarm: any member's address.")] = None
    token: Annotated[str, Option(envvar="NOLOCO_TOKEN", help="Token of a private run.")] = ""
    publish: Annotated[
        Path | None,
        Use.READ_FOLDER,
        Option(help="With --join: publish it, signed by run.key in this directory."),
    ] = None
    hours: Annotated[
        float, Option(metavar="N", min=0.01, max=24, help="With --publish: hours until the plan expires.")
    ] = 6.0
    begin_anew: Annotated[
        list[int] | None,
        Option(
            metavar="STAGE",
            min=0,
            max=1023,
            help="With --publish: stages that nobody is to wait for any longer. The plan in force stays as it is.",
        ),
    ] = None
    stages: Annotated[
        int | None,
        Option(metavar="N", min=1, max=1024, help="Pipeline stages; default: 8, or the swarm's."),
    ] = None
    replicas: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Replicas per stage, for dtfm."),
    ] = None
    objective: Annotated[str, Option(help="Cost model to minimise: noloco or dtfm.")] = "noloco"
    method: Annotated[str, Option(help=f"One of: {', '.join(METHOD_NAMES)}.")] = DEFAULT_METHOD
    seconds: Annotated[float, Option(metavar="N", min=0.01, help="Search time in seconds.")] = 20.0
    evaluations: Annotated[
        int | None, Option(metavar="N", min=1, help="Stop after so many, for a reproducible plan.")
    ] = None
    seed: Annotated[int, Option(metavar="N", min=0, help="Random seed.")] = 0
    uniform: Annotated[
        float, Option(metavar="N", min=0, max=1, help="noloco: least share of traffic routed at random.")
    ] = 1.0
    mixing: Annotated[
        float,
        Option(metavar="N", min=0, max=1, help="noloco: minimum spectral gap 1 − λ₂ of the pairing."),
    ] = 0.5
    microbatches: Annotated[
        int | None,
        Option(metavar="N", min=1, help="noloco: microbatches per inner step; default: 64, or the swarm's."),
    ] = None
    in_flight: Annotated[
        int, Option(metavar="N", min=1, help="noloco: microbatches in flight per replica.")
    ] = 16
    k: Annotated[
        int | None,
        Option("-k", metavar="N", min=1, help="noloco: inner steps per round; default: 50, or the swarm's."),
    ] = None
    compare: Annotated[bool, Option("--compare", help="Run every method with --seeds seeds.")] = False
    seeds: Annotated[int, Option(metavar="N", min=1, max=100, help="Number of seeds for --compare.")] = 3
    picture: Annotated[
        Path | None, Use.WRITE_FILE, Option(help="Draw plan and search to this .svg, .png or .pdf.")
    ] = None
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of tables.")] = False

    def check(self) -> None:
        """Refuse options that cannot be used. Raises `UserError` that names the option."""
        if (self.scenario is None) == (not self.join):
            raise UserError(
                "Give either --scenario FILE or --join ADDRESS: measured links, or a running swarm."
            )
        if self.publish is not None and not (self.join and self.objective == "noloco"):
            raise UserError("--publish needs --join ADDRESS, and the objective noloco.")
        if self.begin_anew and self.publish is None:
            raise UserError("--begin-anew needs --join ADDRESS and --publish DIRECTORY.")
        if self.join and (self.stages or self.microbatches or self.k):
            raise UserError(
                "With --join, the run's manifest gives --stages, --microbatches and -k: leave them out."
            )
        if not all(map(math.isfinite, (self.seconds, self.uniform, self.mixing, self.hours))):
            raise UserError("--seconds, --uniform, --mixing and --hours: give finite numbers.")
        if self.picture is not None and self.picture.suffix not in (".svg", ".png", ".pdf"):
            raise UserError(f"Cannot draw {self.picture}: end its name in .svg, .png or .pdf.")

    @property
    def directories(self) -> list[Path]:
        """Where the token for a private run is looked for first."""
        return [] if self.publish is None else [self.publish]

    @property
    def searches(self) -> list[tuple[str, int]]:
        """Method and seed of each."""
        if not self.compare:
            return [(self.method, self.seed)]
        return [(name, self.seed + s) for name in METHOD_NAMES for s in range(self.seeds)]
