"""The state directory: enough to come back as the same peer, and never half a file."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from node.storage.checkpoint_files import Checkpoint, read
from node.storage.stage_state import StageState
from node.storage.state_directory import MAX_PEER_BOOK, StateDirectory
from protocol.errors import ManifestError, StateError
from protocol.records.identity import Identity
from protocol.records.lineage import Lineage
from protocol.run.manifest import load_preset
from protocol.run.signed_manifest import SignedManifest

RUN = "run-1"


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDirectory]:
    directory = StateDirectory(tmp_path / "state")
    directory.open()
    yield directory
    directory.close()


def test_what_is_kept_is_for_the_volunteer_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (tmp_path / "state").mkdir(mode=0o777)  # of an earlier version
        state = StateDirectory(tmp_path / "state")
        state.open()
        state.identity()
        state.save_token("noloco-secret")
        state.save_peer_book(["/ip4/192.0.2.1/tcp/1"])
        state.save_checkpoint(RUN, checkpoint())
        state.close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    for name in ("identity.key", "token", "peers.json", "checkpoint-1.safetensors"):
        assert stat.S_IMODE((tmp_path / "state" / name).stat().st_mode) == 0o600, name


def checkpoint(step: int = 7, stage: int = 1, size: int = 1000) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    tensors = torch.randn(5, size, generator=generator).unbind()
    return Checkpoint(
        stage, StageState(step, 3, 2, step - 1, *(tensor.clone() for tensor in tensors)), tokens=512
    )


def assert_same(left: Checkpoint | None, right: Checkpoint) -> None:
    assert left is not None
    assert (left.stage, left.tokens, left.position) == (right.stage, right.tokens, right.position)
    for count in ("step", "round", "steps_in_round", "updates"):
        assert getattr(left.state, count) == getattr(right.state, count), count
    assert left.state.tensors().keys() == right.state.tensors().keys()
    for name, tensor in left.state.tensors().items():
        assert torch.equal(tensor, right.state.tensors()[name]), name


def signed(owner: str = "owner") -> SignedManifest:
    return SignedManifest.sign(load_preset("tiny"), Identity.from_seed(owner))


# --- checkpoints --------------------------------------------------------------------------------


def test_a_checkpoint_comes_back_as_it_was_saved(state: StateDirectory) -> None:
    assert state.checkpoint(RUN) is None
    state.save_checkpoint(RUN, checkpoint())
    assert_same(state.checkpoint(RUN), checkpoint())
    state.save_checkpoint(RUN, checkpoint(step=8, stage=0))
    assert_same(StateDirectory(state.path).checkpoint(RUN), checkpoint(step=8, stage=0))


def test_a_checkpoint_of_another_run_is_not_used(state: StateDirectory) -> None:
    state.save_checkpoint("another run", checkpoint())
    assert state.checkpoint(RUN) is None


def damage_by(kind: str, contents: bytes) -> bytes:
    return {
        "cut": contents[:-100],
        "cut in the header": contents[:20],
        "empty": b"",
        "garbage": b"\x00" * len(contents),
        "text": b"no tensors here",
        "no metadata": contents.replace(b"__metadata__", b"__metodata__", 1),
    }[kind]


@pytest.mark.parametrize("kind", ["cut", "cut in the header", "empty", "garbage", "text", "no metadata"])
def test_a_damaged_checkpoint_is_told_with_its_path_and_what_to_do(state: StateDirectory, kind: str) -> None:
    state.save_checkpoint(RUN, checkpoint())
    path = state.path / "checkpoint-1.safetensors"
    path.write_bytes(damage_by(kind, path.read_bytes()))
    with pytest.raises(StateError, match=r"checkpoint-1\.safetensors is damaged.*Delete it"):
        state.checkpoint(RUN)


class FullDisk:
    """`os.fsync` on a disk that has no room left."""

    def __call__(self, descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_the_old_checkpoint_and_no_rubbish(
    state: StateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.save_checkpoint(RUN, checkpoint(step=1))
    monkeypatch.setattr(os, "fsync", FullDisk())
    with pytest.raises(StateError, match="Free some space; what was saved before is still valid"):
        state.save_checkpoint(RUN, checkpoint(step=2))
    monkeypatch.undo()
    assert_same(state.checkpoint(RUN), checkpoint(step=1))
    assert not list(state.path.glob("*.new"))
    state.save_checkpoint(RUN, checkpoint(step=3))
    assert_same(state.checkpoint(RUN), checkpoint(step=3))


def test_a_write_that_was_killed_half_way_leaves_the_old_checkpoint(state: StateDirectory) -> None:
    state.save_checkpoint(RUN, checkpoint(step=1))
    (state.path / "checkpoint-1.safetensors.new").write_bytes(b"half a che")
    assert_same(state.checkpoint(RUN), checkpoint(step=1))
    state.save_checkpoint(RUN, checkpoint(step=2))
    assert_same(state.checkpoint(RUN), checkpoint(step=2))


def test_a_checkpoint_with_a_tensor_missing_is_damaged(state: StateDirectory) -> None:
    half: Any = checkpoint()
    state.save_checkpoint(RUN, Checkpoint(1, replace(half.state)))
    path = state.path / "checkpoint-1.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"theta"', b'"thota"', 1))
    with pytest.raises(StateError, match="damaged"):
        state.checkpoint(RUN)


# --- of each stage that was served --------------------------------------------------------------


def steps_kept(state: StateDirectory) -> dict[int, int]:
    return {kept.stage: kept.step for kept in state.kept(RUN)}


def of_lineage(beginning: int, begun: float = 0.0, step: int = 7) -> Checkpoint:
    saved = checkpoint(step)
    return replace(saved, state=replace(saved.state, lineage=Lineage(beginning, begun)))


def test_a_stage_that_the_node_left_keeps_its_checkpoint(state: StateDirectory) -> None:
    state.save_checkpoint(RUN, replace(checkpoint(step=486, stage=0), saved=10.0))
    state.save_checkpoint(RUN, replace(checkpoint(step=500, stage=1), saved=20.0))
    assert steps_kept(state) == {0: 486, 1: 500}
    assert_same(state.checkpoint(RUN, 0), checkpoint(step=486, stage=0))
    assert_same(state.checkpoint(RUN), checkpoint(step=500, stage=1))
    assert state.checkpoint(RUN, 2) is None


def test_a_damaged_checkpoint_of_another_stage_stops_nobody(state: StateDirectory) -> None:
    state.save_checkpoint(RUN, checkpoint(stage=0))
    os.truncate(state.path / "checkpoint-0.safetensors", 100)
    os.utime(state.path / "checkpoint-0.safetensors", (1, 1))
    state.save_checkpoint(RUN, checkpoint(step=8, stage=1))
    assert_same(state.checkpoint(RUN), checkpoint(step=8, stage=1))
    with pytest.raises(StateError, match=r"checkpoint-0\.safetensors is damaged"):
        state.checkpoint(RUN, 0)


def test_only_the_latest_stages_are_kept_and_none_for_longer_than_that(state: StateDirectory) -> None:
    for stage, saved in ((0, 10.0), (1, 20.0), (2, 30.0), (3, 40.0)):
        state.save_checkpoint(RUN, replace(checkpoint(stage=stage), saved=saved))
    state.prune(RUN, 3, now=50.0, most_stages=2, most_seconds=100.0)
    assert steps_kept(state).keys() == {1, 2, 3}
    state.prune(RUN, 3, now=125.0, most_stages=2, most_seconds=100.0)
    assert steps_kept(state).keys() == {2, 3}
    state.prune(RUN, 3, now=1e9, most_stages=0, most_seconds=1.0)
    assert steps_kept(state).keys() == {3}  # its own


def test_what_others_put_there_is_no_checkpoint_and_stays(state: StateDirectory) -> None:
    theirs = state.path / "checkpoint-of-mine.safetensors"
    theirs.write_bytes(b"what I trained elsewhere")
    state.save_checkpoint(RUN, checkpoint())
    state.prune(RUN, 0, now=1e9, most_stages=0, most_seconds=0.0)
    assert theirs.read_bytes() == b"what I trained elsewhere"
    assert not steps_kept(state)


def test_a_stage_that_is_begun_anew_leaves_its_past_on_the_disk(state: StateDirectory) -> None:
    state.save_checkpoint(RUN, of_lineage(0, 1_000.0, step=486))
    state.save_checkpoint(RUN, of_lineage(1, 9_000.0, step=3))
    state.save_checkpoint(RUN, of_lineage(1, 9_000.0, step=4))
    assert steps_kept(state) == {1: 4}
    _, older = read(state.path / "checkpoint-1-older.safetensors")
    assert (older.state.step, older.state.lineage) == (486, Lineage(0, 1_000.0))
    state.save_checkpoint(RUN, of_lineage(0, 1_000.0, step=490))  # it came back
    assert steps_kept(state) == {1: 490}


def test_of_three_lineages_the_oldest_stays_on_the_disk(state: StateDirectory) -> None:
    for beginning, begun in enumerate((1_000.0, 5_000.0, 9_000.0)):
        state.save_checkpoint(RUN, of_lineage(beginning, begun, step=486 - beginning))
    assert steps_kept(state) == {1: 484}
    _, older = read(state.path / "checkpoint-1-older.safetensors")
    assert (older.state.step, older.state.lineage) == (486, Lineage(0, 1_000.0))


def test_the_state_directory_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parent.parent / "versions" / "69c8df8" / "node-1", tmp_path / "node")
    state = StateDirectory(tmp_path / "node")
    signed = state.manifest()
    assert signed is not None
    saved = state.checkpoint(signed.run_id)
    assert saved is not None
    assert (saved.stage, saved.state.lineage) == (1, Lineage())
    assert saved.state.step >= 12
    assert_same(state.checkpoint(signed.run_id, 1), saved)
    state.save_checkpoint(signed.run_id, replace(saved, stage=0))  # it moves: what it had stays
    assert {kept.stage for kept in state.kept(signed.run_id)} == {0, 1}
    state.save_checkpoint(signed.run_id, saved)
    assert not (state.path / "checkpoint.safetensors").exists()
    assert {kept.stage for kept in state.kept(signed.run_id)} == {0, 1}


# --- who this node is ---------------------------------------------------------------------------


def test_a_second_node_with_the_same_directory_is_refused(state: StateDirectory) -> None:
    second = StateDirectory(state.path)
    with pytest.raises(StateError, match="Another node or seed peer runs with the directory"):
        second.open()
    state.close()
    second.open()  # the first one has ended
    second.close()


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(StateError, match="--state-dir"):
        StateDirectory(tmp_path / "file" / "state").open()


def test_the_identity_stays_and_its_key_is_private(state: StateDirectory) -> None:
    peer = state.identity().peer_id
    assert StateDirectory(state.path).identity().peer_id == peer
    assert stat.S_IMODE(state.identity_path.stat().st_mode) == 0o600


def test_a_damaged_key_is_not_silently_replaced(state: StateDirectory) -> None:
    state.identity_path.write_bytes(b"too short")
    with pytest.raises(StateError, match="not an Ed25519 key file"):
        state.identity()


def test_the_manifest_stays_and_another_runs_is_refused(state: StateDirectory) -> None:
    assert state.manifest() is None
    state.save_manifest(signed())
    state.save_manifest(signed())
    kept = state.manifest()
    assert kept is not None
    assert kept.run_id == signed().run_id
    with pytest.raises(StateError, match=r"belongs to run .*--state-dir"):
        state.save_manifest(signed("another owner"))


def test_a_damaged_manifest_is_told(state: StateDirectory) -> None:
    state.save_manifest(signed())
    path = state.path / "manifest.noloco"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ManifestError):
        state.manifest()


# --- what can be learned again ------------------------------------------------------------------


def test_facts_and_the_peer_book_are_remembered(state: StateDirectory) -> None:
    state.remember(port=4001)
    state.remember(stage=2)
    assert state.facts() == {"port": 4001, "stage": 2}
    state.save_peer_book([f"/ip4/10.0.0.1/tcp/{n}" for n in range(MAX_PEER_BOOK + 50)])
    assert len(state.peer_book()) == MAX_PEER_BOOK
    assert state.peer_book()[0] == "/ip4/10.0.0.1/tcp/0"


@pytest.mark.parametrize("contents", [b"", b"{", b"7", b"[1, 2]", b"\xff\xfe"])
def test_a_damaged_small_file_counts_as_empty(state: StateDirectory, contents: bytes) -> None:
    for name in ("node.json", "peers.json"):
        (state.path / name).write_bytes(contents)
    assert state.facts() == {}
    assert state.peer_book() == []
