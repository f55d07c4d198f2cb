"""The options of `noloco plan`, and what they ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from bootstrap.placement.method_names import NAMES
from protocol.errors import UserError

ScenarioFile = Annotated[
    Path | None, typer.Option(help="Measured links, as JSON; docs/placement.md has the format.")
]
Join = Annotated[list[str] | None, typer.Option(help="Or a running swarm: address of any member.")]
Publish = Annotated[
    Path | None,
    typer.Option(
        help="With --join, for the run's owner: sign with the key in this directory, for nodes to follow."
    ),
]
Hours = Annotated[float, typer.Option(min=0.01, max=24, help="With --publish: how long the plan holds.")]
Stages = Annotated[
    int | None, typer.Option(min=1, max=1024, help="Pipeline stages; default 8, or the running swarm's.")
]
Replicas = Annotated[
    int | None,
    typer.Option(min=1, help="Of each stage; for noloco sizes are free, and this is not used."),
]
Objective = Annotated[str, typer.Option(help="noloco or dtfm: whose cost is to be least.")]
Method = Annotated[str, typer.Option(help=f"One of: {', '.join(NAMES)}.")]
Seconds = Annotated[float, typer.Option(min=0.01, help="To search for.")]
Evaluations = Annotated[
    int | None, typer.Option(min=1, help="Search for this many instead: the same plan each time.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of the random numbers.")]
Uniform = Annotated[
    float, typer.Option(min=0, max=1, help="noloco: least share of traffic routed at random.")
]
Mixing = Annotated[
    float, typer.Option(min=0, max=1, help="noloco: least 1 − λ₂ of a pairing with nearer partners.")
]
Microbatches = Annotated[
    int | None, typer.Option(min=1, help="noloco: of a replica's inner step; default 64, or the swarm's.")
]
InFlight = Annotated[int, typer.Option(min=1, help="noloco: microbatches of a replica on the way.")]
InnerSteps = Annotated[
    int | None, typer.Option("-k", min=1, help="noloco: inner steps of a round; default 50, or the swarm's.")
]
Compare = Annotated[bool, typer.Option(help="Run every method over --seeds, each with the budget.")]
Seeds = Annotated[int, typer.Option(min=1, max=100, help="For --compare.")]
Picture = Annotated[Path | None, typer.Option(help="Draw plan and search, as .svg, .png or .pdf.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of the tables.")]


@dataclass(frozen=True)
class PlanRequest:
    """What `noloco plan` is asked for."""

    scenario: Path | None
    join: list[str] | None
    publish: Path | None
    hours: float
    stages: int | None
    replicas: int | None
    objective: str
    method: str
    seconds: float
    evaluations: int | None
    seed: int
    uniform: float
    mixing: float
    microbatches: int | None
    in_flight: int
    k: int | None
    compare: bool
    seeds: int
    picture: Path | None
    as_json: bool

    def check(self) -> None:
        """Raises `UserError` that names the option."""
        if (self.scenario is None) == (not self.join):
            raise UserError(
                "Give either --scenario FILE or --join ADDRESS: measured links, or a running swarm."
            )
        if self.publish is not None and not (self.join and self.objective == "noloco"):
            raise UserError("--publish needs --join ADDRESS, and the objective noloco.")
        if self.join and (self.stages or self.microbatches or self.k):
            raise UserError(
                "With --join, the run's manifest gives --stages, --microbatches and -k: leave them out."
            )
        if not all(map(math.isfinite, (self.seconds, self.uniform, self.mixing, self.hours))):
            raise UserError("--seconds, --uniform, --mixing and --hours: give finite numbers.")
        if self.picture is not None and self.picture.suffix not in (".svg", ".png", ".pdf"):
            raise UserError(f"Cannot draw {self.picture}: end its name in .svg, .png or .pdf.")

    @property
    def searches(self) -> list[tuple[str, int]]:
        """Method and seed of each."""
        if not self.compare:
            return [(self.method, self.seed)]
        return [(name, self.seed + s) for name in NAMES for s in range(self.seeds)]
