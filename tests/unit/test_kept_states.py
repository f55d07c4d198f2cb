"""What `noloco doctor --self` shows of the states that a directory keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bootstrap.inspect.inspect_cli import examine
from bootstrap.inspect.kept_states import states_table
from node.state.copy_keeper import copies_in
from node.storage.checkpoint_files import Checkpoint, path_of
from node.storage.stage_state import StageState
from node.storage.state_directory import StateDirectory
from protocol.records.lineage import Lineage

NOW = 1_800_000_000.0


def kept(stage: int, step: int, minutes: float, beginning: int = 0) -> Checkpoint:
    flat = torch.zeros(1_000)
    state = StageState(
        step, step // 5, 0, step, flat, flat, flat, flat, flat, lineage=Lineage(beginning, NOW - 900)
    )
    return Checkpoint(stage, state, saved=NOW - 60 * minutes)


def test_stage_step_age_and_size_of_all_that_is_kept_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, copies = StateDirectory(tmp_path), copies_in(tmp_path)
    directory.save_checkpoint("run", kept(0, 480, 60))
    directory.save_checkpoint("run", kept(0, 20, 10, 1))
    directory.save_checkpoint("run", kept(1, 1_200, 8))
    copies.save_checkpoint("run", kept(2, 475, 4))
    path_of(tmp_path, 3).write_bytes(b"nonsense")
    table = states_table(tmp_path, NOW)
    assert table is not None
    columns = [list(column.cells) for column in table.columns]
    rows = [tuple(row[:4]) for row in zip(*columns, strict=True)]
    served, aside = "served here", "served here, set aside: of an older lineage"
    assert rows == [
        ("0", aside, "480", "60.0 min ago"),
        ("0", served, "20", "10.0 min ago"),
        ("1", served, "1,200", "8.0 min ago"),
        ("?", "damaged: checkpoint-3.safetensors", "-", "-"),
        ("2", "copy of others'", "475", "4.0 min ago"),
    ]
    assert columns[4][0].endswith("KiB") or columns[4][0].endswith("B")
    assert not examine(tmp_path)  # no node runs here
    assert "served here" in capsys.readouterr().out


def test_without_any_there_is_no_table(tmp_path: Path) -> None:
    assert states_table(tmp_path, NOW) is None
