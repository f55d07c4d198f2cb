"""Checkpoints on disk: one file for each stage that this node has served, whole or not there at all.

A file is in the format of safetensors: the tensors of a `StageState`, and beside them facts under a checksum. Until
version 0.2 a node had one file for whatever stage it served, `checkpoint.safetensors`: it is read as that stage's.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch

from node.storage.position import Position
from node.storage.stage_state import LARGEST, StageState
from protocol.errors import LaterVersion, StateError
from protocol.files.installation import upgrade_line
from protocol.ground import MOST_COUNT
from protocol.records.lineage import MOST_BEGINNINGS, Lineage

MOST_TOKENS = 2**63
MOST_STAGES = 1_024  # of a manifest
MOST_SECONDS = 253_402_300_800.0  # the year 10000, in which a date is no longer written with four digits
TENSORS = ("phi", "theta", "delta", "first_moment", "second_moment")

OF_ONE_STAGE = "checkpoint.safetensors"  # of earlier versions
PATTERN = "checkpoint-*.safetensors"
COPIES = "copies"  # the folder of copies in the directory of a seed peer or a node
OWN_NAME = re.compile(r"checkpoint-(\d{1,4})\.safetensors")
OLDER_NAME = re.compile(r"checkpoint-(\d{1,4})-older\.safetensors")
CHECKPOINT_FORMAT = (
    1  # a file that says nothing has it: counted up when earlier versions would read one wrongly
)
OF_FACTS = "facts_crc32"  # the checksum of
FACTS = {
    "run", "stage", "step", "round", "saved", "steps_in_round", "updates", "tokens", "position", "crc32"
}  # fmt: skip
FIRST_FACTS = {"run", "stage", "step", "round", "position", "crc32"}
LINEAGE_FACTS = {"beginning", "begun"}  # those of earlier versions have none
# what a file of this kind can raise that is cut short, altered or no such file at all
DAMAGE = (
    safetensors.SafetensorError, KeyError, ValueError, TypeError, OverflowError, RecursionError, OSError
)  # fmt: skip


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
            facts = _checked(path, dict(file.metadata() or {}))
            tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        flat = torch.float32, (tensors["phi"].numel(),)
        if any((tensor.dtype, tuple(tensor.shape)) != flat for tensor in tensors.values()):
            raise ValueError("its tensors are not float32 of one size")
        written = int(facts["crc32"])
        if written != _checksum(tensors) and written != _checksum(
            tensors, TENSORS
        ):  # the first versions' order
            raise ValueError("its checksum does not fit")
        _require_bounded(tensors)
        position = Position.of(json.loads(facts["position"]))
        stage, tokens, saved = _stage_in(facts), _number(facts, "tokens", MOST_TOKENS), _saved_in(facts)
        return facts["run"], Checkpoint(stage, _state_of(facts, tensors), position, tokens, saved)
    except DAMAGE as error:
        raise _damaged(path, error) from None


def header_of(path: Path) -> KeptCheckpoint:
    """Read what a checkpoint says of itself, without its tensors. Raises `StateError` as `read` does."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            facts = _checked(path, dict(file.metadata() or {}))
            headers = [file.get_slice(name) for name in TENSORS]
            [parameters] = headers[0].get_shape()
            if any((h.get_shape(), h.get_dtype()) != ([parameters], "F32") for h in headers):
                raise ValueError("its tensors are not float32 of one size")
        step, round_ = (_number(facts, name, MOST_COUNT) for name in ("step", "round"))
        return KeptCheckpoint(
            path, facts["run"], _stage_in(facts), step, round_, _lineage_in(facts), _saved_in(facts), parameters,
            path.stat().st_size,
        )  # fmt: skip
    except DAMAGE as error:
        raise _damaged(path, error) from None


def piece_of(kept: KeptCheckpoint, bounds: slice) -> list[torch.Tensor]:
    """φ, δ and AdamW's moments over `bounds`, float32, read from the disk. Raises `StateError`."""
    names = [name for name in TENSORS if name != "theta"]
    try:
        with safetensors.safe_open(kept.path, framework="pt") as file:
            if _checked(kept.path, dict(file.metadata() or {}))["step"] != str(kept.step):
                raise ValueError("another has taken its place")
            found = {name: file.get_slice(name)[bounds.start : bounds.stop].clone() for name in names}
        _require_bounded(found)
        return list(found.values())
    except DAMAGE as error:
        raise _damaged(kept.path, error) from None


def superfluous(
    kept: Iterable[KeptCheckpoint], stage: int, now: float, most_stages: int, most_seconds: float
) -> list[KeptCheckpoint]:
    """The checkpoints that a node at `stage` need not keep: all but the latest `most_stages` others of its run.

    Those older than `most_seconds` go, too, unless nobody can say how old they are.
    """
    others = sorted((k for k in kept if k.stage != stage), key=lambda k: k.saved, reverse=True)
    return [k for place, k in enumerate(others) if place >= most_stages or 0 < k.saved < now - most_seconds]


def _checked(path: Path, facts: dict[str, str]) -> dict[str, str]:
    """Check the facts against their checksum, which those of early versions do not have.

    Raises `ValueError`, and `LaterVersion` for those that this version would read wrongly.
    """
    of_facts = facts.pop(OF_FACTS, None)
    number = facts.get("format", "1")
    if number.isascii() and number.isdigit() and int(number[:9]) > CHECKPOINT_FORMAT:
        raise LaterVersion(
            f"A later version of noloco-node wrote the checkpoint {path}, in format {number[:9]}. It stays as it is. "
            f"Upgrade this one: {upgrade_line()}"
        )
    if of_facts is None:  # the first versions had fewer: they went on at the beginning of a round
        is_whole = facts.keys() >= FIRST_FACTS and facts.keys() <= FACTS | LINEAGE_FACTS
        facts = {
            "steps_in_round": "0",
            "updates": facts.get("step", ""),
            "tokens": "0",
            "saved": "0.0",
        } | facts
    else:  # a later version may say more, under a checksum of all
        is_whole = facts.keys() >= FACTS and of_facts == str(_checksum_of(facts))
    if not is_whole:
        raise ValueError("its numbers are not those that were written")
    return facts


def _damaged(path: Path, error: Exception) -> StateError:
    return StateError(
        f"The checkpoint {path} is damaged, or of an older version ({error}). Delete it: the node then "
        "downloads its stage from other replicas."
    )


def _number(facts: Mapping[str, str], name: str, most: int) -> int:
    number = int(facts[name])
    if not 0 <= number <= most:
        raise ValueError(f"no {name.replace('_', ' ')} is {number:.3g}, they go from 0 to {most:.3g}")
    return number


def _stage_in(facts: Mapping[str, str]) -> int:
    return _number(facts, "stage", MOST_STAGES - 1)


def _saved_in(facts: Mapping[str, str]) -> float:
    saved = float(facts["saved"])
    if not 0 <= saved < MOST_SECONDS:  # not NaN either
        raise ValueError("it was saved at a time that never was")
    return saved


def _lineage_in(facts: Mapping[str, str]) -> Lineage:
    lineage = Lineage.of(facts)
    if lineage.beginning > MOST_BEGINNINGS or lineage.begun >= MOST_SECONDS:
        raise ValueError("its stage cannot have begun so often, or so late")
    return lineage


def _require_bounded(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse NaN, infinity and numbers beyond `LARGEST`: they would be in all averages from then on.

    Raises `ValueError`. Takes a pass over each tensor and no memory.
    """
    for name, tensor in tensors.items():
        lowest, highest = (end.item() for end in torch.aminmax(tensor)) if tensor.numel() else (0.0, 0.0)
        if not (lowest >= -LARGEST and highest <= LARGEST):
            reach = f"from {lowest:.3g} to {highest:.3g}, and may from {-LARGEST:g} to {LARGEST:g}"
            raise ValueError(f"its {name.replace('_', ' ')} goes {reach}")


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
    counts = ("step", "round", "steps_in_round", "updates")
    step, round_, in_round, updates = (_number(facts, name, MOST_COUNT) for name in counts)
    return StageState(step, round_, in_round, updates, **tensors, lineage=_lineage_in(facts))


def _checksum_of(facts: dict[str, str]) -> int:
    """Checksum of what stands beside the tensors: a step, a round or a position that nobody ever reached."""
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def _checksum(tensors: Mapping[str, torch.Tensor], order: Sequence[str] = ()) -> int:
    """CRC-32 over the tensors' bytes, by name if no order is given: a flipped bit on the disk must not train on."""
    checksum = 0
    for name in order or sorted(tensors):
        checksum = zlib.crc32(tensors[name].contiguous().numpy().data.cast("B"), checksum)
    return checksum
