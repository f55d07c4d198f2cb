"""Every setting of the daemon, once. Flags, NOLOCO_… variables and the settings file are made from this class."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from node.machine.limits import parse_size
from protocol.errors import UserError

ENVIRONMENT_PREFIX = "NOLOCO_"


class NodeConfig(BaseModel):
    """What a volunteer can set. Validates and does no I/O."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    join: tuple[str, ...] = Field(
        default=(), description="Address of any member of the run; repeat it to give several."
    )
    state_dir: Path = Field(
        default=Path("noloco-state"), description="Directory for this node's key and checkpoint."
    )
    run: str = Field(default="", description="Run id to expect; peers of any other run are refused.")
    stage: int = Field(
        default=-1, ge=-1, description="Pipeline stage to serve; -1 picks the stage that needs replicas most."
    )
    moves: bool = Field(
        default=True, description="Move to another stage when it is short of replicas; ignored with --stage."
    )
    data: tuple[str, ...] = Field(
        default=(),
        description="Training data: text, JSONL or parquet files or globs, dataset directories, or hub:NAME.",
    )
    text_field: str = Field(
        default="text", description="Field that holds the text in JSONL files, parquet files and datasets."
    )
    data_cache: Path | None = Field(
        default=None, description="Directory for prepared documents; defaults to one inside --state-dir."
    )
    tokenizer: str = Field(
        default="", description="The run's tokenizer.json, or hub:NAME; by default another member sends it."
    )
    from_checkpoint: str = Field(
        default="",
        description="Hugging Face directory or hub name to take initial weights from; for a run's first replicas.",
    )
    host: str = Field(default="0.0.0.0", description="Address to listen on; 0.0.0.0 means every interface.")
    port: int = Field(default=0, ge=0, le=65_535, description="TCP port to listen on; 0 picks a free one.")
    announce: tuple[str, ...] = Field(
        default=(), description="Multiaddress to announce to other peers, for a port that is mapped."
    )
    relay: bool = Field(
        default=True, description="Use libp2p relays to reach peers behind NAT, and map the port with UPnP."
    )
    device: str = Field(
        default="auto",
        description="Torch device: auto, cpu, cuda:1, …; all, or a list as cuda:0,cuda:1, is one node per device.",
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
        description="Memory limit for this node, such as 4GiB or 800MiB; GPU memory if it runs on a GPU.",
    )
    compile: bool = Field(
        default=False, description="Compile the stage with torch.compile; the first start is slow."
    )
    threads: int = Field(default=0, ge=0, description="Number of torch threads; 0 lets torch choose.")
    max_minutes: float = Field(
        default=0,
        ge=0,
        description="Train for this many minutes; a first stage then only serves the model, later stages leave.",
    )
    checkpoint_minutes: float = Field(
        default=5, gt=0, description="Maximum minutes between checkpoints; small stages are saved more often."
    )
    trace: Path | None = Field(
        default=None, description="Write a timing trace to this file; open it in ui.perfetto.dev."
    )
    verbose: bool = Field(default=False, description="Also log what the network layer does.")

    @field_validator("max_memory")
    @classmethod
    def _is_a_size(cls, text: str) -> str:
        if text:
            parse_size(text)
        return text

    @property
    def most_memory(self) -> int:
        """Bytes of `max_memory`; 0 is no limit."""
        return parse_size(self.max_memory) if self.max_memory else 0


def build_config(
    flags: Mapping[str, object], environment: Mapping[str, str] | None = None, file: Path | None = None
) -> NodeConfig:
    """Flags before environment before file before defaults. Raises `UserError` that names the setting."""
    environment = os.environ if environment is None else environment
    values: dict[str, object] = _from_file(file) if file else {}
    for name, field in NodeConfig.model_fields.items():
        text = environment.get(ENVIRONMENT_PREFIX + name.upper())
        if text:
            several = "tuple" in str(field.annotation)
            values[name] = tuple(text.split()) if several else text
    values |= {name: value for name, value in flags.items() if value is not None}
    try:
        return NodeConfig.model_validate(values)
    except ValidationError as error:
        told = [
            (_flag(problem["loc"]), problem["msg"].removeprefix("Value error, "))
            for problem in error.errors()
        ]
        lines = [f"{flag}: {message}" for flag, message in told]
        raise UserError("These settings cannot be used:\n  " + "\n  ".join(lines)) from None


def _flag(place: tuple[int | str, ...]) -> str:
    return "--" + str(place[0]).replace("_", "-") if place else "settings"


def _from_file(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"Cannot read the settings file {file}: {error}") from None
