"""Weights that an export has fetched are read from a file that may be cut, and written to a disk that may be full."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from bootstrap.export.checkpoint import write_shards
from bootstrap.export.fetching import PIECE_BYTES, Donor, Source, StageFile
from bootstrap.export.folder import PARTIAL, require_free
from node.model.fragment import PIECE_PARAMETERS
from node.model.stage import parameter_count
from protocol.errors import StateError
from protocol.ground import PeerId
from tests.swarm.micro import micro_manifest

PARAMETERS = 2 * PIECE_PARAMETERS + 5
WEIGHTS = torch.arange(PARAMETERS, dtype=torch.float32)


@pytest.fixture
def fetched(tmp_path: Path) -> StageFile:
    """Two whole pieces and a short one."""
    file = StageFile(tmp_path, "run", Source(0, PARAMETERS, (Donor(PeerId("a"), 3, 1),)))
    for piece in file.missing:
        file.store(piece, WEIGHTS[piece * PIECE_PARAMETERS : (piece + 1) * PIECE_PARAMETERS])
    return file


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 1), (PIECE_PARAMETERS - 1, PIECE_PARAMETERS + 1), (PARAMETERS - 5, PARAMETERS), (0, PARAMETERS), (3, 3)],
)  # fmt: skip
def test_any_part_is_what_was_fetched(start: int, stop: int, fetched: StageFile) -> None:
    assert np.array_equal(fetched[start:stop], WEIGHTS[start:stop].numpy())


@pytest.mark.parametrize("left", [0, 3, PIECE_BYTES, 4 * PARAMETERS - 1])
def test_a_file_that_is_cut_is_a_sentence_and_fetched_again(left: int, fetched: StageFile) -> None:
    os.truncate(fetched.path, left)
    with pytest.raises(StateError, match=r"stage-0000\.f32 was cut while .* start again with the same --out"):
        fetched[0:PARAMETERS]
    again = StageFile(fetched.path.parent, "run", fetched.source)
    whole = left // PIECE_BYTES
    assert len(again.present) == (whole if whole else 0)
    for piece in again.missing:
        again.store(piece, WEIGHTS[piece * PIECE_PARAMETERS : (piece + 1) * PIECE_PARAMETERS])
    assert np.array_equal(again[0:PARAMETERS], WEIGHTS.numpy())


@pytest.fixture
def no_room() -> Iterator[None]:
    """A limit on the size of files, which the system enforces as it does a full disk."""
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("no_room")
def test_a_disk_without_room_is_the_systems_error(tmp_path: Path) -> None:
    """The library of safetensors has an error of its own for it, which nobody would have caught."""
    manifest = micro_manifest(model__intermediate_size=2**15)
    flats = [np.zeros(parameter_count(manifest, stage), np.float32) for stage in range(manifest.stages)]
    with pytest.raises(OSError, match="File too large") as failure:
        list(write_shards(manifest, flats, tmp_path, torch.float32, 10**9))
    assert failure.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_export_was_writing_is_not_in_the_next_ones_way(tmp_path: Path) -> None:
    new = tmp_path / PARTIAL / "new"
    new.mkdir(parents=True)
    (new / ".tmpYq0Zx1").write_bytes(b"half of the weigh")
    require_free(tmp_path)
    (new / ".tmp of mine").write_bytes(b"")
    with pytest.raises(StateError, match=r"partial/new/\.tmp of mine"):
        require_free(tmp_path)
