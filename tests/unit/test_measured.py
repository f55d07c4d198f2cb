"""The losses that a local swarm measures, as the page reads them from its summary."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bootstrap.dashboard.board import Measured
from bootstrap.dashboard.collector import Audience
from bootstrap.dashboard.measured import LATEST, follow_measured, measured_in
from bootstrap.local.summary import Summary
from tests.swarm.micro import until


async def test_losses_come_as_they_are_measured_while_somebody_watches(tmp_path: Path) -> None:
    file, noted, audience = tmp_path / "summary.json", list[Measured](), Audience()
    summary = Summary(run_id="run", began=100.0, validation_loss=[(0, 0.0, 5.5)], is_held_out=False)
    summary.write(file)
    following = asyncio.create_task(follow_measured(file, "run", noted.append, audience))
    await asyncio.sleep(60.0)
    assert noted == []
    with audience.watching():
        await until(lambda: bool(noted))
        assert noted[-1] == {"held_out": False, "points": [(100.0, 0, 5.5)], "bigram": None}
        summary.validation_loss.append((900, 30.0, 3.25))
        summary.write(file)
        await until(lambda: noted[-1]["points"] == [(100.0, 0, 5.5), (130.0, 900, 3.25)])
        file.unlink()  # nobody looks at half a file: what was known stays
        before = len(noted)
        await asyncio.sleep(60.0)
        assert len(noted) == before
    following.cancel()


@pytest.mark.parametrize(
    "said",
    [
        "", "[]", "7", "{" * 200_000, '{"run_id": "run"}',
        '{"run_id": "run", "began": "x", "validation_loss": []}',
        '{"run_id": "run", "began": 1e999, "validation_loss": []}',
        '{"run_id": "run", "began": 7, "validation_loss": 7}',
    ],
)  # fmt: skip
def test_what_is_no_summary_shows_no_losses(tmp_path: Path, said: str) -> None:
    (tmp_path / "summary.json").write_text(said, encoding="utf-8")
    assert measured_in(tmp_path / "summary.json", "run") is None
    assert measured_in(tmp_path / "none.json", "run") is None


def test_of_a_summarys_losses_only_numbers_are_shown(tmp_path: Path) -> None:
    losses = "[[0, 1, 2.5], [0, 1], 7, [0, -1, 2], [0, 1, NaN], [true, 1, 2], [9, 1e14, 2]]"
    said = f'{{"run_id": "run", "began": 7, "validation_loss": {losses}, "bigram_entropy": NaN}}'
    (tmp_path / "summary.json").write_text(said, encoding="utf-8")
    found = measured_in(tmp_path / "summary.json", "run")
    assert found is not None
    assert (found["points"], found["bigram"]) == ([(8.0, 0, 2.5), (LATEST, 9, 2.0)], None)
