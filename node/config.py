"""Every setting of the daemon, once. Flags, NOLOCO_… variables and the settings file are made from this class."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from node.machine.environment import ENVIRONMENT_PREFIX
from node.machine.home import at_home, paths_at_home
from node.machine.hours import Hours
from node.machine.limits import parse_rate, parse_share, parse_size
from node.machine.listening import parse_listen
from node.machine.named import HUB, Use, require_use
from protocol.errors import UserError

# settings that few people need: --help-all shows them, and --help the others
RARE = frozenset(
    ("run", "text_field", "data_cache", "cache_size", "tokenizer", "from_checkpoint", "host", "announce", "relay",
     "precision", "recompute", "compile", "threads", "checkpoint_minutes", "trace", "panel", "verbose",
     "max_temperature", "relay_for_others", "name", "network_hours", "keep", "keep_stages", "keep_days", "begin_anew")
)  # fmt: skip
MOST_HOURS = 300  # characters of them
MANIFEST_FILE = "manifest.noloco"  # in the state directory of a node that has been a member of a run
NO_ADDRESS = (
    "Tell this node where the run is: noloco join /ip4/…/tcp/…/p2p/…\n"
    "The address of any member will do; the run's owner or any volunteer's log has one.\n"
    "To found a run of your own: noloco found --preset tiny. To try it alone: noloco swarm."
)


class NodeConfig(BaseModel):
    """The settings that a volunteer can make. Validates them and does no I/O."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    join: tuple[str, ...] = Field(default=(), description="Address of any member; may be repeated.")
    state_dir: Annotated[Path, Use.WRITE_FOLDER] = Field(
        default=Path("noloco-state"), description="Directory for this node's key and checkpoint."
    )
    token: str = Field(default="", repr=False, description="Token of a private run; or as NOLOCO_TOKEN.")
    run: str = Field(default="", description="Run id to expect; peers of any other run are refused.")
    name: str = Field(
        default="",
        max_length=32,
        description="Your name in the list of contributors.",
    )
    stage: int = Field(
        default=-1, ge=-1, description="Pipeline stage to serve; -1 picks the stage that needs replicas most."
    )
    moves: bool = Field(default=True, description="Move to a stage that is short of replicas.")
    data: Annotated[tuple[str, ...], Use.TEXT] = Field(
        default=(),
        description="Training data: text, JSONL or parquet files or globs, dataset directories, or hub:NAME.",
    )
    text_field: str = Field(
        default="text",
        description="Field of a row that holds the text or a chat; with dots for a nested one, as answer.text.",
    )
    data_cache: Annotated[Path | None, Use.WRITE_FOLDER] = Field(
        default=None, description="Directory for prepared documents; defaults to one inside --state-dir."
    )
    cache_size: str = Field(
        default="",
        description="Limit for prepared documents, such as 50GB or 30% of the disk; by default the smaller of 20GB "
        "and 10%. The oldest that nobody uses are removed.",
    )
    tokenizer: Annotated[str, Use.READ] = Field(
        default="", description="The run's tokenizer.json, or hub:NAME; by default another member sends it."
    )
    from_checkpoint: Annotated[str, Use.CHECKPOINT] = Field(
        default="",
        description="Hugging Face directory or hub name to take initial weights from; for a run's first replicas.",
    )
    host: str = Field(default="0.0.0.0", description="Address to listen on; 0.0.0.0 means every interface.")
    port: int = Field(default=0, ge=0, le=65_535, description="TCP port to listen on; 0 picks a free one.")
    announce: tuple[str, ...] = Field(
        default=(), description="Multiaddress to announce to other peers, for a port that is mapped."
    )
    relay: bool = Field(
        default=True,
        description="Be reached through other peers where nobody can dial this node; map the port by UPnP.",
    )
    device: str = Field(
        default="auto",
        description="Torch device: auto, cpu, cuda:1, mps; all, or a list as cuda:0,cuda:1, is one node per device.",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto",
        description="Arithmetic precision: auto, fp32 or bf16; auto uses bf16 where the device supports it.",
    )
    recompute: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Recompute activations in the backward pass: auto (only if they do not fit), on or off.",
    )
    max_memory: str = Field(
        default="",
        description="Memory limit, such as 4GiB, 800MiB or 50%.",
    )
    max_upload: str = Field(default="", description="Upload limit, such as 20Mbit or 2.5MB/s.")
    max_download: str = Field(default="", description="Download limit.")
    relay_for_others: str = Field(
        default="", description="Pass on so much between nodes that cannot dial each other, such as 20Mbit."
    )
    monthly_cap: str = Field(default="", description="Traffic after which to pause, such as 500GB.")
    gpu_percent: int = Field(
        default=100,
        ge=1,
        le=100,
        description="Percent of the time to compute.",
    )
    max_temperature: int = Field(
        default=0, ge=0, le=120, description="Compute less when the device gets hotter, in °C; 0 is no limit."
    )
    hours: str = Field(
        default="", max_length=MOST_HOURS, description="Hours to train, as 22-07 or mon-fri 22-07,sat."
    )
    network_hours: str = Field(
        default="",
        max_length=MOST_HOURS,
        description="Hours to use the network in; outside of them it pauses and sends and receives next to nothing.",
    )
    only_idle: bool = Field(default=False, description="Pause while it is in use or on battery.")
    compile: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Compile the stage at the start: on, off, or auto (on GPUs); without a value: on.",
    )
    threads: int = Field(
        default=0, ge=0, description="Number of torch threads; 0: as many as cores, or as a quota allows."
    )
    max_minutes: float = Field(
        default=0,
        ge=0,
        description="Minutes to train; 0: to the end.",
    )
    checkpoint_minutes: float = Field(
        default=5, gt=0, description="Maximum minutes between checkpoints; small stages are saved more often."
    )
    keep_stages: int = Field(
        default=2, ge=0, le=1_024, description="Other stages it has served, whose last checkpoint is kept."
    )
    keep_days: float = Field(default=7, ge=0, le=3_650, description="Days to keep those checkpoints for.")
    keep: bool = Field(
        default=False, description="Keep recent copies of all stages, for when nobody serves one."
    )
    begin_anew: bool = Field(
        default=False,
        description="If nobody has the stage's state, begin it anew at once, without waiting for its return.",
    )
    trace: Annotated[Path | None, Use.WRITE_FILE] = Field(
        default=None, description="Write a timing trace to this file; open it in ui.perfetto.dev."
    )
    panel: bool = Field(
        default=True, description="In a terminal, show a panel of how training goes; without it, lines."
    )
    dashboard: str = Field(default="", description="Show the run on a web page at HOST:PORT.")
    verbose: bool = Field(default=False, description="Also log what the network layer does.")

    @field_validator("state_dir", "data_cache", "trace")
    @classmethod
    def _is_at_home(cls, path: Path | None) -> Path | None:
        try:
            return paths_at_home(path)
        except UserError as error:
            raise ValueError(str(error)) from None

    @field_validator("compile", mode="before")
    @classmethod
    def _as_it_was_when_it_was_a_flag(cls, wish: object) -> object:
        return {"true": "on", "1": "on", "false": "off", "0": "off"}.get(str(wish).lower(), wish)

    @field_validator("monthly_cap")
    @classmethod
    def _is_an_amount(cls, text: str) -> str:
        if text.strip().endswith("%"):
            raise ValueError(f"{text!r} is a share, and there is nothing to take it of: write it as 500GB")
        if text:
            parse_size(text)
        return text

    @field_validator("max_memory", "cache_size")
    @classmethod
    def _is_a_size(cls, text: str) -> str:
        if text and parse_share(text) is None:
            parse_size(text)
        return text

    @field_validator("max_upload", "max_download")
    @classmethod
    def _is_a_rate(cls, text: str) -> str:
        if text:
            parse_rate(text)
        return text

    @field_validator("hours", "network_hours")
    @classmethod
    def _are_hours(cls, text: str) -> str:
        if text:
            Hours.parse(text)
        return text

    @field_validator("run")
    @classmethod
    def _is_a_run(cls, text: str) -> str:
        if text and not re.fullmatch("[0-9a-f]{32}", text):
            raise ValueError(
                f"{text[:40]!r} is not a run's id: copy its 32 digits from what founding it printed"
            )
        return text

    @field_validator("dashboard")
    @classmethod
    def _is_a_place(cls, text: str) -> str:
        if text:
            parse_listen(text)
        return text

    @property
    def most_memory(self) -> int:
        """Bytes of `max_memory`, once a share is one of something; 0 is no limit."""
        return parse_size(self.max_memory) if self.max_memory else 0


def build_config(
    flags: Mapping[str, object], environment: Mapping[str, str] | None = None, file: Path | None = None
) -> NodeConfig:
    """Build the settings: flags before environment before file before defaults.

    Raises `UserError` that names settings as given.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, object] = _from_file(at_home(file)) if file else {}
    named = {name: f"{name} in {file}" for name in values}
    values |= {
        name: (value,) for name, value in values.items() if isinstance(value, str) and _takes_several(name)
    }
    for name in NodeConfig.model_fields:
        variable = ENVIRONMENT_PREFIX + name.upper()
        if text := environment.get(variable):
            values[name] = tuple(text.split()) if _takes_several(name) else text
            named[name] = variable
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        config = NodeConfig.model_validate(values | given)
    except ValidationError as error:
        elsewhere = {name: place for name, place in named.items() if name not in given}
        told = [_told(problem, elsewhere) for problem in error.errors()]
        raise UserError(
            "These settings cannot be used; noloco join --help says what each takes:\n  " + "\n  ".join(told)
        ) from None
    for name, field in NodeConfig.model_fields.items():
        value = getattr(config, name)
        for use in [each for each in field.metadata if isinstance(each, Use) and each is not Use.TEXT]:
            if value and not str(value).startswith(HUB):
                flag = f"--{name.replace('_', '-')}"
                shown = flag if name in given else named.get(name, flag)
                require_use(at_home(value), use, shown)
    return config


def _takes_several(name: str) -> bool:
    return name in NodeConfig.model_fields and "tuple" in str(NodeConfig.model_fields[name].annotation)


def _told(problem: ErrorDetails, named: Mapping[str, str]) -> str:
    """A sentence that names the setting as whoever gave it did."""
    name = str(problem["loc"][0]) if problem["loc"] else "settings"
    shown = named.get(name, "--" + name.replace("_", "-"))
    if problem["type"] == "extra_forbidden":
        return f"{shown}: there is no such setting.{_meant(name, list(NodeConfig.model_fields))}"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    message = (
        message.replace("String should", "it should")
        .replace("a valid tuple", 'a list in brackets, ["…", "…"]')
        .replace("a valid string", "text in quotes")
    )
    return f"{shown}: {message}"


def _meant(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {close[0]}?" if close else " noloco join --help lists all of them."


def _from_file(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"Cannot read the settings file {file} ({error.strerror}). Check --config.") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"The settings file {file} is not UTF-8 text (near byte {error.start:,}). Save it as UTF-8."
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"The settings file {file} is not TOML: {error}. Correct that place.") from None


def arguments_of(config: NodeConfig, *, only_changed: bool = False) -> list[str]:
    """The flags that give these settings again; `only_changed` leaves out those with their default."""
    arguments = []
    for name, value in config.model_dump(exclude={"token"}).items():  # others see a process's arguments
        flag = name.replace("_", "-")
        if only_changed and value == NodeConfig.model_fields[name].default:
            continue
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple):
            arguments += [f"--{flag}={entry}" for entry in value]
        elif value is not None and value != "":
            arguments.append(f"--{flag}={value}")
    return arguments
