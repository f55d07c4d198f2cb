"""A stage that does not fit is told in numbers before anything is allocated."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from node.config import NodeConfig
from node.machine.limits import Room
from node.membership.stage_choice import Abilities
from node.model.memory_model import memory_of_buffers
from node.model.resources import (
    GIB,
    STARTING,
    least_memory,
    memory_needed,
    nbytes_of_checkpoint,
    require_disk,
    require_memory,
    stages_that_fit,
)
from node.model.stage import parameter_count
from node.storage.checkpoint_files import path_of
from node.storage.state_directory import StateDirectory
from protocol.errors import ResourceError
from protocol.run.manifest import load_preset

LARGE = load_preset("llama-6.8b")


def free(count: int, limit: int = 0, source: str = "") -> Room:
    return Room(count, limit or count, source)


def test_what_fits_raises_nothing(tmp_path: Path) -> None:
    require_memory(load_preset("tiny"), 0, free(GIB))
    require_disk(load_preset("tiny"), 0, tmp_path)
    needed = least_memory(LARGE, 1) + STARTING
    require_memory(LARGE, 1, free(needed))
    with pytest.raises(ResourceError):
        require_memory(LARGE, 1, free(needed - 1))
    assert 1 in stages_that_fit(LARGE, free(needed))
    assert 1 not in stages_that_fit(LARGE, free(needed - 1))


def test_too_little_memory_is_told_with_what_is_needed_what_is_there_and_what_to_do() -> None:
    needed = least_memory(LARGE, 1) + STARTING
    with pytest.raises(ResourceError) as refusal:
        require_memory(LARGE, 1, free(4 * GIB))
    words = str(refusal.value)
    assert "Stage 1 of run 'llama-6.8b'" in words
    assert f"{needed / GIB:.1f} GiB" in words
    assert "4.0 GiB are free. " in words
    assert "Stage 0 is the smallest" in words
    assert "smaller stages" in words


def test_a_limit_is_named_with_one_that_would_do_and_a_stage_that_fits() -> None:
    some = least_memory(LARGE, 0) + STARTING
    with pytest.raises(ResourceError) as refusal:
        require_memory(LARGE, 1, free(some, limit=some + GIB, source="--max-memory"))
    words = str(refusal.value)
    assert f"of the {(some + GIB) / GIB:.1f} GiB that --max-memory allows" in words
    enough = float(words.split("A limit of ")[1].split(" GiB")[0]) * GIB
    assert least_memory(LARGE, 1) + STARTING + GIB <= enough
    assert "Stage 0 fits" in words


def test_what_is_the_hosts_is_not_asked_of_a_gpu() -> None:
    on_gpu = least_memory(LARGE, 1, on_host=False)
    assert least_memory(LARGE, 1) == on_gpu + memory_of_buffers(LARGE, 1).total


def test_too_little_disk_is_told_with_the_directory_and_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ResourceError) as refusal:
        require_disk(LARGE, 0, tmp_path, free=GIB)
    words = str(refusal.value)
    assert str(tmp_path) in words
    assert "1.0 GiB are free" in words
    assert "--state-dir" in words


def test_a_checkpoint_on_the_disk_is_replaced_and_those_of_other_stages_stay_beside(tmp_path: Path) -> None:
    whole = nbytes_of_checkpoint(LARGE, 0)
    require_disk(LARGE, 0, tmp_path, free=2 * whole)
    require_disk(LARGE, 0, tmp_path, free=whole, here=whole)
    with pytest.raises(ResourceError):
        require_disk(LARGE, 0, tmp_path, free=2 * whole - 1)
    with pytest.raises(ResourceError):
        require_disk(LARGE, 0, tmp_path, free=whole - 1, here=3 * whole)  # the new one is written beside it
    with pytest.raises(ResourceError, match="for those of other stages"):
        require_disk(LARGE, 0, tmp_path, free=2 * whole, beside=1)


class NoData:
    """A supply of text that has all that is asked for."""

    def require(self) -> None:
        pass


@pytest.mark.parametrize(("keep", "checkpoints"), [(False, 3), (True, 5)])
def test_a_move_leaves_room_for_the_state_of_the_old_stage_and_for_copies(
    keep: bool, checkpoints: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = load_preset("tiny")
    assert manifest.stages == 2
    config = NodeConfig(device="cpu", keep=keep)
    abilities = Abilities(config, manifest, StateDirectory(tmp_path), NoData())  # type: ignore[arg-type]
    sizes = [nbytes_of_checkpoint(manifest, stage) for stage in (0, 1)]
    # two of the new stage, one of the old stage; a copy of each
    needed = 2 * sizes[1] + sizes[0] + (sum(sizes) if keep else 0)
    assert needed >= (checkpoints - 1) * min(sizes)

    def free(nbytes: int) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=nbytes))

    free(needed)
    abilities.check_move(0, 1)
    free(needed - 1)
    with pytest.raises(ResourceError):
        abilities.check_move(0, 1)
    path_of(tmp_path, 0).write_bytes(bytes(sizes[0]))  # saved by now
    free(needed - sizes[0])
    abilities.check_move(0, 1)


@pytest.mark.parametrize("stage", [0, 1])
def test_the_estimate_covers_weights_gradients_momenta_and_activations(stage: int) -> None:
    for name in ("tiny", "llama-125m"):
        manifest = load_preset(name)
        state = parameter_count(manifest, stage) * 4 * 6  # θ, gradients, φ, δ and AdamW's two moments
        assert state < memory_needed(manifest, stage) < 3 * state + 64 * GIB


def test_more_stages_need_less_each() -> None:
    two, four = (LARGE.model_copy(update={"stages": stages}) for stages in (2, 4))
    assert memory_needed(four, 1) < memory_needed(two, 1)
