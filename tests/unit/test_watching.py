"""What `noloco watch` writes is what the programs that it is for read."""

from __future__ import annotations

import json
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

from bootstrap.dashboard.board import Point
from bootstrap.dashboard.watching import curves_of, to_file, to_tensorboard, to_wandb
from protocol.errors import StateError

POINTS = [
    Point(1_000.0 + 10 * i, 512 * i, None if i == 0 else 3.0 - i / 10, 51.2, 1e-3, None, 4) for i in range(5)
]


def test_tensorboard_loads_the_curves_with_tokens_as_steps(tmp_path: Path) -> None:
    with to_tensorboard(tmp_path) as write:
        for point in POINTS:
            write(point)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        read: Any = EventAccumulator(str(tmp_path))
        read.Reload()
    assert set(read.Tags()["scalars"]) == {
        "learning/loss", "replicas/spread", "speed/tokens_per_second", "swarm/members",
    }  # fmt: skip
    losses = read.Scalars("learning/loss")
    assert [(e.step, e.wall_time) for e in losses] == [(512 * i, 1_000.0 + 10 * i) for i in range(1, 5)]
    assert [e.value for e in losses] == pytest.approx([2.9, 2.8, 2.7, 2.6])


def test_wandb_gets_them_in_a_run_of_the_project_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, float]] = []
    stand_in = types.ModuleType("wandb")
    run = types.SimpleNamespace(log=logged.append, finish=lambda: logged.append({"finished": 1}))

    def init(project: str) -> types.SimpleNamespace:
        logged.append({project: 1})
        return run

    stand_in.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    with to_wandb("mine") as write:
        write(POINTS[1])
    assert logged == [{"mine": 1}, {**curves_of(POINTS[1]), "tokens": 512}, {"finished": 1}]


def test_lines_are_appended_and_each_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "curves.jsonl"
    for point in POINTS[:2]:
        with to_file(file) as write:
            write(point)
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert lines == [point._asdict() for point in POINTS[:2]]
    assert lines[0]["loss"] is None
    with to_file(Path("-")) as write:
        write(POINTS[4])
    assert json.loads(capsys.readouterr().out)["tokens"] == 2048


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="another --events"), to_file(tmp_path / "file" / "x"):
        pass
    with pytest.raises(StateError, match="another --tensorboard"), to_tensorboard(tmp_path / "file" / "x"):
        pass
