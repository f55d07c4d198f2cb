"""`noloco plan`: which device takes which stage, from measured links or from a running swarm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from bootstrap.placement import DEFAULT_METHOD, METHOD_NAMES
from node.command import fail
from protocol.errors import NolocoError, UserError

ScenarioFile = Annotated[
    Path | None, typer.Option(help="Measured links as JSON; the format is in docs/placement.md.")
]
Join = Annotated[
    list[str] | None, typer.Option(help="Plan for a running swarm instead: address of any member.")
]
Publish = Annotated[
    Path | None,
    typer.Option(help="With --join: publish the plan, signed with the owner's key in this directory."),
]
Hours = Annotated[float, typer.Option(min=0.01, max=24, help="With --publish: hours until the plan expires.")]
Stages = Annotated[
    int | None,
    typer.Option(min=1, max=1024, help="Number of pipeline stages; default: 8, or the running swarm's."),
]
Replicas = Annotated[
    int | None,
    typer.Option(min=1, help="Replicas per stage; ignored for noloco, whose stage sizes are free."),
]
Objective = Annotated[str, typer.Option(help="Cost model to minimise: noloco or dtfm.")]
Method = Annotated[str, typer.Option(help=f"One of: {', '.join(METHOD_NAMES)}.")]
Seconds = Annotated[float, typer.Option(min=0.01, help="Search time in seconds.")]
Evaluations = Annotated[
    int | None, typer.Option(min=1, help="Stop after this many evaluations instead, for a reproducible plan.")
]
Seed = Annotated[int, typer.Option(min=0, help="Random seed.")]
Uniform = Annotated[
    float, typer.Option(min=0, max=1, help="noloco: minimum share of traffic that is routed at random.")
]
Mixing = Annotated[
    float,
    typer.Option(
        min=0, max=1, help="noloco: minimum spectral gap 1 − λ₂ when pairing prefers near partners."
    ),
]
Microbatches = Annotated[
    int | None, typer.Option(min=1, help="noloco: microbatches per inner step; default: 64, or the swarm's.")
]
InFlight = Annotated[int, typer.Option(min=1, help="noloco: microbatches in flight per replica.")]
InnerSteps = Annotated[
    int | None, typer.Option("-k", min=1, help="noloco: inner steps per round; default: 50, or the swarm's.")
]
Compare = Annotated[
    bool, typer.Option(help="Run every method with --seeds seeds, each with the full budget.")
]
Seeds = Annotated[int, typer.Option(min=1, max=100, help="Number of seeds for --compare.")]
Picture = Annotated[
    Path | None, typer.Option(help="Draw the plan and the search to this .svg, .png or .pdf file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


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
        return [(name, self.seed + s) for name in METHOD_NAMES for s in range(self.seeds)]


def plan(
    scenario: ScenarioFile = None,
    join: Join = None,
    publish: Publish = None,
    hours: Hours = 6.0,
    stages: Stages = None,
    replicas: Replicas = None,
    objective: Objective = "noloco",
    method: Method = DEFAULT_METHOD,
    seconds: Seconds = 20.0,
    evaluations: Evaluations = None,
    seed: Seed = 0,
    uniform: Uniform = 1.0,
    mixing: Mixing = 0.5,
    microbatches: Microbatches = None,
    in_flight: InFlight = 16,
    k: InnerSteps = None,
    compare: Compare = False,
    seeds: Seeds = 3,
    picture: Picture = None,
    as_json: AsJson = False,
) -> None:
    """Place devices in pipeline stages so that training waits least for the network."""
    request = PlanRequest(**locals())
    try:
        request.check()
        from bootstrap.placement.plan_run import make_and_show

        make_and_show(request)
    except NolocoError as error:
        fail(error)
