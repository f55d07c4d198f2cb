"""Checkpoints on disk: one file for each stage that this node has served, whole or not there at all.

A file is in the format of safetensors: the tensors of a `StageState`, and beside them facts under a checksum. Until
version 0.2 a node had one file for whatever stage it served, `checkpoint.safetensors`: it is read as that stage's.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch

from node.data.batches import Position
from node.model.flat import StageState
from protocol.errors import StateError
from protocol.lineage import Lineage

OF_ONE_STAGE = "checkpoint.safetensors"  # of earlier versions
PATTERN = "checkpoint-*.safetensors"
COPIES = "copies"  # the folder of copies in the directory of a seed peer or a node
OWN_NAME = re.compile(r"checkpoint-(\d{1,4})\.safetensors")
OLDER_NAME = re.compile(r"checkpoint-(\d{1,4})-older\.safetensors")
OF_FACTS = "facts_crc32"  # the checksum of
FACTS = {
    "run", "stage", "step", "round", "saved", "steps_in_round", "updates", "tokens", "position", "crc32"
}  # fmt: skip
LINEAGE_FACTS = {"beginning", "begun"}  # those of earlier versions have none


@dataclass(frozen=True)
class Checkpoint:
    stage: int
    state: StageState
    position: Position | None = None  # in the data, of a node that has trained on some
    tokens: int = 0  # that this node has trained on at the stage
    saved: float = 0.0  # when, on the wall clock; 0 is not known


@dataclass(frozen=True)
class KeptCheckpoint:
    """What a checkpoint on disk says of itself; its tensors have not been read."""

    path: Path
    run: str
    stage: int
    step: int
    round: int
    lineage: Lineage
    saved: float
    parameters: int
    nbytes: int


def path_of(directory: Path, stage: int) -> Path:
    """The place of a stage's checkpoint."""
    return directory / f"checkpoint-{stage}.safetensors"


def set_aside_path(directory: Path, stage: int) -> Path:
    """The place of a stage's checkpoint of an older lineage than the one that is trained now."""
    return directory / f"checkpoint-{stage}-older.safetensors"


def nbytes_by_stage(directory: Path) -> dict[int, int]:
    """Bytes of the last checkpoint of each stage in the directory; those set aside are not counted."""
    found: dict[int, int] = {}
    for path in directory.glob(PATTERN):
        if name := OWN_NAME.fullmatch(path.name):
            with suppress(OSError):
                found[int(name[1])] = path.stat().st_size
    return found


def contents_of(run_id: str, checkpoint: Checkpoint) -> list[bytes | memoryview]:
    """The file, in parts. The writer of safetensors would copy all tensors first."""
    state = checkpoint.state
    facts = {
        "run": run_id,
        "stage": str(checkpoint.stage),
        "step": str(state.step),
        "round": str(state.round),
        "saved": str(checkpoint.saved),
        "steps_in_round": str(state.steps_in_round),
        "updates": str(state.updates),
        "tokens": str(checkpoint.tokens),
        "position": json.dumps(checkpoint.position.facts() if checkpoint.position else None),
        **state.lineage.facts(),
    }
    tensors = state.tensors()
    facts["crc32"] = str(_checksum(tensors))
    facts[OF_FACTS] = str(_checksum_of(facts))
    return _safetensors(tensors, facts)


def read(path: Path) -> tuple[str, Checkpoint]:
    """The run that a checkpoint is of, and the checkpoint. Raises `StateError` when it is damaged, or is none."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            facts = _checked(dict(file.metadata() or {}))
            tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if int(facts["crc32"]) != _checksum(tensors):
            raise ValueError("its checksum does not fit")
        position = Position.of(json.loads(facts["position"]))
        stage, tokens, saved = int(facts["stage"]), int(facts["tokens"]), float(facts["saved"])
        return facts["run"], Checkpoint(stage, _state_of(facts, tensors), position, tokens, saved)
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
        raise _damaged(path, error) from None


def header_of(path: Path) -> KeptCheckpoint:
    """Read what a checkpoint says of itself, without its tensors. Raises `StateError` as `read` does."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            facts = _checked(dict(file.metadata() or {}))
            [parameters] = file.get_slice("phi").get_shape()
        return KeptCheckpoint(
            path, facts["run"], int(facts["stage"]), int(facts["step"]), int(facts["round"]), Lineage.of(facts),
            _finite(float(facts["saved"])), parameters, path.stat().st_size,
        )  # fmt: skip
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
        raise _damaged(path, error) from None


def piece_of(kept: KeptCheckpoint, bounds: slice) -> list[torch.Tensor]:
    """φ, δ and AdamW's moments over `bounds`, float32, read from the disk. Raises `StateError`."""
    names = ("phi", "delta", "first_moment", "second_moment")
    try:
        with safetensors.safe_open(kept.path, framework="pt") as file:
            if _checked(dict(file.metadata() or {}))["step"] != str(kept.step):
                raise ValueError("another has taken its place")
            return [file.get_slice(name)[bounds.start : bounds.stop].clone() for name in names]
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
        raise _damaged(kept.path, error) from None


def superfluous(
    kept: Iterable[KeptCheckpoint], stage: int, now: float, most_stages: int, most_seconds: float
) -> list[KeptCheckpoint]:
    """The checkpoints that a node at `stage` need not keep: all but the latest `most_stages` others of its run.

    Those older than `most_seconds` go, too, unless nobody can say how old they are.
    """
    others = sorted((k for k in kept if k.stage != stage), key=lambda k: k.saved, reverse=True)
    return [k for place, k in enumerate(others) if place >= most_stages or 0 < k.saved < now - most_seconds]


def _checked(facts: dict[str, str]) -> dict[str, str]:
    """Check the facts against their checksum, which those of early versions do not have. Raises `ValueError`."""
    of_facts = facts.pop(OF_FACTS, None)
    if facts.keys() - LINEAGE_FACTS != FACTS or of_facts not in (None, str(_checksum_of(facts))):
        raise ValueError("its numbers are not those that were written")
    return facts


def _damaged(path: Path, error: Exception) -> StateError:
    return StateError(
        f"The checkpoint {path} is damaged, or of an older version ({error}). Delete it: the node then "
        "downloads its stage from other replicas."
    )


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError("a time that never was")
    return number


def _safetensors(tensors: Mapping[str, torch.Tensor], facts: dict[str, str]) -> list[bytes | memoryview]:
    """A file of float32 tensors in the format of safetensors."""
    header: dict[str, object] = {"__metadata__": facts}
    start = 0
    for name, tensor in tensors.items():
        stop = start + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned
    parts = [tensor.contiguous().numpy().data.cast("B") for tensor in tensors.values()]
    return [len(text).to_bytes(8, "little"), text, *parts]


def _state_of(facts: dict[str, str], tensors: dict[str, torch.Tensor]) -> StageState:
    """Make a state of a checkpoint's contents.

    Raises `KeyError`, `ValueError` or `TypeError` for what is missing, or should not be there.
    """
    step, round_, in_round, updates = (int(facts[n]) for n in ("step", "round", "steps_in_round", "updates"))
    return StageState(step, round_, in_round, updates, **tensors, lineage=Lineage.of(facts))


def _checksum_of(facts: dict[str, str]) -> int:
    """Checksum of what stands beside the tensors: a step, a round or a position that nobody ever reached."""
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def _checksum(tensors: Mapping[str, torch.Tensor]) -> int:
    """CRC-32 over the tensors' bytes: a flipped bit on the disk must not train on."""
    checksum = 0
    for name in sorted(tensors):
        checksum = zlib.crc32(tensors[name].contiguous().numpy().data.cast("B"), checksum)
    return checksum
