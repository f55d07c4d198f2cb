"""A scenario for `noloco simulate swarm`: who takes part, over what network, in what run, and what happens."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from node.machine.home import at_home
from node.machine.named import Use, is_there, require_use
from protocol.errors import ScenarioError
from protocol.run.manifest_advice import advice

SWARM_PRESETS = (
    "lab-8", "regional-64", "world-1k", "world-10k",
    "spot-churn", "mass-exit", "partition", "flash-crowd", "slow-fifth", "hidden-1k",
)  # fmt: skip
MOST_PEERS = 20_000

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Natural = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ScenarioSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PeerKind(ScenarioSection):
    """So many peers alike. Speeds in microbatches per second, forward and backward; uplinks in Mbit/s."""

    name: Annotated[str, Field(min_length=1, max_length=32)]
    count: Annotated[int, Field(ge=0, le=MOST_PEERS)]
    speed: Positive = 0.5
    spread: Annotated[float, Field(ge=0, le=0.5)] = 0.05  # standard deviation of the speeds, relative
    uplink: Positive = 100.0
    dials_out: Share = 0.0  # of them, are behind a NAT
    in_network: Annotated[int, Field(ge=1, le=250)] = 1  # of them share a network, as in one data centre
    preempted: Share = 0.0  # of them, a minute
    replaced: bool = True  # for each that is preempted another one arrives
    # "diurnal": between half and all of them, once around in `day` minutes
    presence: Literal["constant", "diurnal"] = "constant"
    day: Positive = 1_440.0


class SwarmChange(ScenarioSection):
    """Something that happens once: the "exit" of a share of the peers, or the "arrival" of such a share."""

    what: Literal["exit", "arrival"]
    minute: NotNegative
    share: Positive  # of the peers at that time
    within: NotNegative = 0.0  # minutes, spread evenly

    @model_validator(mode="after")
    def _can_leave(self) -> Self:
        if self.what == "exit" and self.share > 1:
            raise ValueError(f"changes.share {self.share:g}: no more than all can leave, so 1 at most")
        return self


class SwarmRegion(ScenarioSection):
    name: Annotated[str, Field(min_length=1, max_length=32)]
    share: Positive  # of the peers, in proportion
    latency: Annotated[list[NotNegative], Field(min_length=1)]  # ms one way, to each region in their order


class SwarmPartition(ScenarioSection):
    """A share of the peers and the rest cannot reach each other."""

    minute: NotNegative
    minutes: Positive
    share: Share = 0.5


class SwarmNetwork(ScenarioSection):
    regions: Annotated[list[SwarmRegion], Field(min_length=1)] = [
        SwarmRegion(name="here", share=1.0, latency=[20.0])
    ]
    jitter: Share = 0.25  # of a latency, at most, more
    loss: Annotated[float, Field(ge=0, le=0.5)] = 0.001  # of messages: sent again, or no answer of the DHT
    # Of pairs of peers behind NATs, those that meet directly; between the others one that can be dialled passes on
    punched: Share = 0.0
    passed_on: Positive = 20.0  # Mbit/s, by each of these at most
    partitions: list[SwarmPartition] = []

    @model_validator(mode="after")
    def _is_square(self) -> Self:
        for region in self.regions:
            if len(region.latency) != len(self.regions):
                raise ValueError(
                    f"network.regions: {region.name} has {len(region.latency)} latencies for {len(self.regions)} "
                    "regions: give one to each, itself included"
                )
        return self


class SwarmRun(ScenarioSection):
    """The run that is trained, as far as it decides anything. Bytes are as they travel."""

    stages: Annotated[int, Field(ge=1, le=256)] = 2
    inner_steps: Natural = 10  # k, of a round
    microbatches: Natural = 8  # of an inner step
    staleness: Literal[0, 1] = 1
    window: Annotated[float, Field(ge=0, le=0.9)] = 0.25
    activation_bytes: Natural = 500_000
    state_bytes: Natural = (
        20_000_000  # of a stage's slice, as partners exchange it; a newcomer loads three times that
    )
    record_lifetime: Annotated[float, Field(ge=3, le=3_600)] = 45.0
    microbatch_deadline: Positive = 30.0
    gossip_deadline: Positive = 30.0
    minutes: Positive = 10.0
    warm_up: NotNegative = 2.0  # minutes that do not count
    seed: int = 0

    @model_validator(mode="after")
    def _is_long_enough(self) -> Self:
        if self.warm_up >= self.minutes:
            raise ValueError(f"run.warm_up {self.warm_up:g} must be below run.minutes {self.minutes:g}")
        return self


class SwarmScenario(ScenarioSection):
    name: Annotated[str, Field(min_length=1, max_length=64)] = "unnamed"
    run: SwarmRun = SwarmRun()
    peers: Annotated[list[PeerKind], Field(min_length=1)]
    network: SwarmNetwork = SwarmNetwork()
    changes: list[SwarmChange] = []

    @model_validator(mode="after")
    def _has_enough(self) -> Self:
        count = sum(kind.count for kind in self.peers)
        if count < self.run.stages:
            raise ValueError(f"peers: {count} are too few for run.stages {self.run.stages}: add some")
        if count > MOST_PEERS:
            raise ValueError(f"peers: {count} are more than the {MOST_PEERS} that can be simulated")
        return self

    @property
    def count(self) -> int:
        """Peers at the beginning."""
        return sum(kind.count for kind in self.peers)


def swarm_scenario(contents: object, where: str) -> SwarmScenario:
    """Validate a scenario. Raises `ScenarioError` that names `where` and each bad setting."""
    try:
        return SwarmScenario.model_validate(contents)
    except ValidationError as error:
        problems = [advice(problem, SwarmScenario) for problem in error.errors()]
        raise ScenarioError(f"{where} cannot be simulated:\n  " + "\n  ".join(problems)) from None


def presets_told() -> str:
    """Return a line for each preset: its name, and what it is."""
    width = max(map(len, SWARM_PRESETS))
    return "\n".join(
        f"  {name:{width}}  {_preset(name).splitlines()[0].lstrip('# ')}" for name in SWARM_PRESETS
    )


def _preset(name: str) -> str:
    return resources.files(__package__).joinpath("presets", f"{name}.toml").read_text(encoding="utf-8")


def read_scenario(name: str) -> SwarmScenario:
    """A preset by its name, else a TOML file. Raises `ScenarioError`."""
    if name in SWARM_PRESETS:
        return swarm_scenario({"name": name, **tomllib.loads(_preset(name))}, f"The preset {name}")
    file = at_home(name)
    if not file.suffix and not is_there(file, ScenarioError):
        raise ScenarioError(
            f"There is no preset {name!r}. Choose one of: {', '.join(SWARM_PRESETS)}, or a TOML file."
        )
    require_use(file, Use.READ_FILE, "SCENARIO")
    try:
        contents = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ScenarioError(f"Cannot read the scenario {file} ({error.strerror}). Check the path.") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ScenarioError(f"{file} is not TOML: {error}. Correct that place.") from None
    return swarm_scenario({"name": file.stem, **contents}, str(file))


def changed(scenario: SwarmScenario, **settings: object) -> SwarmScenario:
    """The scenario with other settings of the run, those that are not None. Raises `ScenarioError`."""
    given = {name: value for name, value in settings.items() if value is not None}
    run = scenario.run.model_dump() | given
    return swarm_scenario(scenario.model_dump() | {"run": run}, f"The scenario {scenario.name}")
