"""Every setting of the daemon, once. Flags, NOLOCO_… variables and the settings file are made from this class."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from node.machine.sizes import parse_size
from protocol.errors import UserError

ENVIRONMENT_PREFIX = "NOLOCO_"


class NodeConfig(BaseModel):
    """What a volunteer can set. Validates and does no I/O."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    join: Annotated[
        tuple[str, ...], Field(description="Address of any member of the run; may be given several times.")
    ] = ()
    state_dir: Annotated[Path, Field(description="Where this node keeps its key and checkpoint.")] = Path(
        "noloco-state"
    )
    run: Annotated[str, Field(description="Expected run id; a peer of another run is then refused.")] = ""
    stage: Annotated[
        int, Field(ge=-1, description="Pipeline stage to serve; -1 takes the one that needs replicas most.")
    ] = -1
    moves: Annotated[
        bool, Field(description="Move to another stage when that is short of replicas; not with --stage.")
    ] = True
    data: Annotated[
        tuple[str, ...],
        Field(
            description="Text, JSONL or parquet files or globs, dataset directories, or hub:NAME to train on."
        ),
    ] = ()
    text_field: Annotated[str, Field(description="Where JSONL, parquet and datasets have the text.")] = "text"
    data_cache: Annotated[
        Path | None, Field(description="Where documents are kept; within --state-dir if not given.")
    ] = None
    tokenizer: Annotated[
        str, Field(description="The run's tokenizer.json, if no member is to give it; or hub:NAME.")
    ] = ""
    from_checkpoint: Annotated[
        str,
        Field(description="Hugging Face directory or hub name that the run starts from; for first replicas."),
    ] = ""
    host: Annotated[str, Field(description="Address to listen on; 0.0.0.0 for all interfaces.")] = "0.0.0.0"
    port: Annotated[int, Field(ge=0, le=65_535, description="TCP port to listen on; 0 takes a free one.")] = 0
    announce: Annotated[
        tuple[str, ...], Field(description="Multiaddress to tell others, behind a mapped port.")
    ] = ()
    relay: Annotated[
        bool, Field(description="Reach peers behind NAT through libp2p relays, and map the port by UPnP.")
    ] = True
    device: Annotated[
        str,
        Field(description="Torch device: auto, cpu, cuda:1 …; all, or cuda:0,cuda:1, is a node for each."),
    ] = "auto"
    precision: Annotated[
        Literal["auto", "fp32", "bf16"],
        Field(description="Of the arithmetic: auto, fp32 or bf16; auto takes bf16 where the device has it."),
    ] = "auto"
    recompute: Annotated[
        Literal["auto", "on", "off"],
        Field(
            description="Compute activations again in the backward pass: auto (if they do not fit), on, off."
        ),
    ] = "auto"
    max_memory: Annotated[
        str,
        Field(description="Most memory that this node may take, of the GPU if it has one: 4GiB, 800MiB."),
    ] = ""
    compile: Annotated[bool, Field(description="Compile the stage with torch.compile; slow to start.")] = (
        False
    )
    threads: Annotated[int, Field(ge=0, description="Torch threads; 0 leaves the choice to torch.")] = 0
    max_minutes: Annotated[
        float,
        Field(
            ge=0,
            description="Train so many minutes; then the first stage only serves the model, a later one leaves.",
        ),
    ] = 0
    checkpoint_minutes: Annotated[
        float, Field(gt=0, description="Most minutes between checkpoints; small stages save more often.")
    ] = 5
    trace: Annotated[
        Path | None, Field(description="Write where the time goes to this file, for ui.perfetto.dev.")
    ] = None
    verbose: Annotated[bool, Field(description="Log what the network does, too.")] = False

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
    flags: Mapping[str, Any], environment: Mapping[str, str] | None = None, file: Path | None = None
) -> NodeConfig:
    """Flags before environment before file before defaults. Raises `UserError` that names the setting."""
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = _from_file(file) if file else {}
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


def _from_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"Cannot read the settings file {file}: {error}") from None
