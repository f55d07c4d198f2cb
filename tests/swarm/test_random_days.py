"""Pause, resume, Ctrl-C, kill -9, start, move, sleep, partition and a full disk, in random order, lose no lineage."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.state import copies
from tests.swarm.micro import run_swarm
from tests.swarm.random_days import Day, watched

__all__ = ["watched"]
SHAPES = {"2 x 2": (2, 2), "3 x 1": (1, 3)}  # replicas of a stage, stages
IN_THE_GATE = (2, 5)
A_HUNDRED = range(100, 150)  # of each shape


def live(directory: Path, seed: int, shape: str, days: list[Day]) -> None:
    async def main() -> None:
        day = Day(directory, seed, *SHAPES[shape])
        days.append(day)
        try:
            await day.live()
        except BaseException:
            print("\n".join(day.log))
            raise
        print("\n".join(day.log))
        assert not day.wrong, "\n".join(day.wrong)

    run_swarm(main())


@pytest.fixture(autouse=True)
def _patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half of the days nothing is recent for long, so that stages are waited for."""
    if request.node.callspec.params["seed"] % 4 < 2:
        monkeypatch.setattr(copies, "RECENT_SECONDS", 20.0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", IN_THE_GATE)
def test_a_random_day_loses_no_lineage_and_mixes_no_two(
    seed: int, shape: str, tmp_path: Path, watched: list[Day]
) -> None:
    live(tmp_path, seed, shape, watched)


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", A_HUNDRED)
def test_a_hundred_random_days_lose_no_lineage_and_mix_no_two(
    seed: int, shape: str, tmp_path: Path, watched: list[Day]
) -> None:
    live(tmp_path, seed, shape, watched)
