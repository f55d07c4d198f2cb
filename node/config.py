"""Every setting of the daemon, once. Flags, NOLOCO_… variables and the settings file are made from this class."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from node.machine.limits import parse_size
from protocol.errors import UserError

ENVIRONMENT_PREFIX = "NOLOCO_"


class NodeConfig(BaseModel):
    """What a volunteer can set. Validates and does no I/O."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    join: Annotated[
        tuple[str, ...], Field(description="Address of any member of the run; repeat it to give several.")
    ] = ()
    state_dir: Annotated[Path, Field(description="Directory for this node's key and checkpoint.")] = Path(
        "noloco-state"
    )
    run: Annotated[str, Field(description="Run id to expect; peers of any other run are refused.")] = ""
    stage: Annotated[
        int, Field(ge=-1, description="Pipeline stage to serve; -1 picks the stage that needs replicas most.")
    ] = -1
    moves: Annotated[
        bool, Field(description="Move to another stage when it is short of replicas; ignored with --stage.")
    ] = True
    data: Annotated[
        tuple[str, ...],
        Field(
            description="Training data: text, JSONL or parquet files or globs, dataset directories, or hub:NAME."
        ),
    ] = ()
    text_field: Annotated[
        str, Field(description="Field that holds the text in JSONL files, parquet files and datasets.")
    ] = "text"
    data_cache: Annotated[
        Path | None,
        Field(description="Directory for prepared documents; defaults to one inside --state-dir."),
    ] = None
    tokenizer: Annotated[
        str, Field(description="The run's tokenizer.json, or hub:NAME; by default another member sends it.")
    ] = ""
    from_checkpoint: Annotated[
        str,
        Field(
            description="Hugging Face directory or hub name to take initial weights from; for a run's first replicas."
        ),
    ] = ""
    host: Annotated[str, Field(description="Address to listen on; 0.0.0.0 means every interface.")] = (
        "0.0.0.0"
    )
    port: Annotated[int, Field(ge=0, le=65_535, description="TCP port to listen on; 0 picks a free one.")] = 0
    announce: Annotated[
        tuple[str, ...],
        Field(description="Multiaddress to announce to other peers, for a port that is mapped."),
    ] = ()
    relay: Annotated[
        bool, Field(description="Use libp2p relays to reach peers behind NAT, and map the port with UPnP.")
    ] = True
    device: Annotated[
        str,
        Field(
            description="Torch device: auto, cpu, cuda:1, …; all, or a list as cuda:0,cuda:1, is one node per device."
        ),
    ] = "auto"
    precision: Annotated[
        Literal["auto", "fp32", "bf16"],
        Field(
            description="Arithmetic precision: auto, fp32 or bf16; auto uses bf16 where the device supports it."
        ),
    ] = "auto"
    recompute: Annotated[
        Literal["auto", "on", "off"],
        Field(
            description="Recompute activations in the backward pass: auto (only if they do not fit), on or off."
        ),
    ] = "auto"
    max_memory: Annotated[
        str,
        Field(
            description="Memory limit for this node, such as 4GiB or 800MiB; GPU memory if it runs on a GPU."
        ),
    ] = ""
    compile: Annotated[
        bool, Field(description="Compile the stage with torch.compile; the first start is slow.")
    ] = False
    threads: Annotated[int, Field(ge=0, description="Number of torch threads; 0 lets torch choose.")] = 0
    max_minutes: Annotated[
        float,
        Field(
            ge=0,
            description="Train for this many minutes; a first stage then only serves the model, later stages leave.",
        ),
    ] = 0
    checkpoint_minutes: Annotated[
        float,
        Field(gt=0, description="Maximum minutes between checkpoints; small stages are saved more often."),
    ] = 5
    trace: Annotated[
        Path | None, Field(description="Write a timing trace to this file; open it in ui.perfetto.dev.")
    ] = None
    verbose: Annotated[bool, Field(description="Also log what the network layer does.")] = False

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
