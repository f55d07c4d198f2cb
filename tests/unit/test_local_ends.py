"""The end of a local swarm: how it ended, one spread, where to go on; and what measuring may take."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bootstrap.dashboard.rows import row_of
from bootstrap.evaluation.measuring import Loss, MeasuredText
from bootstrap.inspect.observer import Observer
from bootstrap.inspect.remembering import Memory
from bootstrap.inspect.table import Picture, node_table
from bootstrap.inspect.verdict import verdict
from bootstrap.local.budget import FEWEST, LAST_SECONDS, LEAST_PAUSE, SHARE, EvaluationBudget
from bootstrap.local.measuring import Measuring
from bootstrap.local.summary import Summary
from protocol.ground import PeerId
from tests.unit.test_little_text import plan_of
from tests.unit.test_verdict import pairs


def ended(steps: int, *, complete: bool) -> Summary:
    summary = Summary(complete=complete, total_steps=1_000)
    summary.validation_loss = [(0, 0.0, 5.5), (9_000, 60.0, 2.0)]
    summary.nodes = {"s0r0": {"stage": 0, "steps": steps, "compute_fraction": 0.5}}
    return summary


def test_a_run_that_time_has_ended_is_not_called_complete() -> None:
    assert ended(266, complete=False).end_in_words() == "Training stopped at step 266 of 1,000 (time over)"
    assert ended(1_000, complete=True).end_in_words() == "Training is complete: step 1,000 of 1,000"
    seen = Memory(2, "0.1.0", 1_000).look(pairs(2, state="finished", step=266), 1.0)
    told = verdict(seen)[0]
    assert told.sentence == "training has stopped at step 266 of 1,000; its nodes serve the model"
    whole = verdict(replace(seen, total_steps=266))[0]
    assert whole.sentence == "the run is complete; its nodes serve the model"


@pytest.mark.parametrize(
    ("exact", "shown"), [(5.75e-4, "5.75e-04"), (None, "8.08e-03 on a sample of the weights")]
)
def test_one_spread_is_shown_and_the_next_step_has_its_path(exact: float | None, shown: str) -> None:
    summary = ended(266, complete=False)
    summary.replica_spread, summary.replica_spread_estimate = exact, 8.08e-3
    summary.export = {"directory": "/tmp/my swarm/export", "swarm_loss": 2.0, "not_loaded": "transformers"}
    summary.sequences = (64, 256)
    lines = summary.lines()
    assert [line for line in lines if "spread" in line] == [f"replica spread   {shown}"]
    assert lines[-1] == "go on            noloco generate 'def ' --model '/tmp/my swarm/export'"
    assert "on 64 of 256 sequences: this machine is slow" in lines[1]


def test_a_nodes_name_stands_in_table_and_page_for_its_key() -> None:
    anna, other = pairs(1)
    record = anna.member.announcement.model_copy(update={"name": "Anna\x1b[2J"})
    anna = replace(anna, member=replace(anna.member, announcement=record))
    console = Console(file=io.StringIO(), width=120)
    console.print(node_table(Picture("a run", 1.0, [anna, other]), 120))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "Anna\\x1b[2J" in shown
    assert anna.member.peer[-8:] not in shown
    assert other.member.peer[-8:] in shown
    assert row_of(anna, None, {})["name"] == "Anna\\x1b[2J"


def test_a_quick_machine_measures_all_and_a_slow_one_a_part_within_its_share() -> None:
    quick = EvaluationBudget()
    quick.note(256, 1.0)
    assert quick.on_the_way(256) == quick.at_the_end(256, 4) == 256
    assert quick.pause() == LEAST_PAUSE
    slow = EvaluationBudget()
    slow.note(256, 128.0)
    assert slow.on_the_way(256) == FEWEST
    assert slow.at_the_end(256, 4) == LAST_SECONDS / 4 / 0.5
    slow.note(FEWEST, 4.0)
    assert 4.0 / (4.0 + slow.pause()) == pytest.approx(SHARE)


async def test_measuring_on_the_way_and_at_the_end_keeps_to_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a second of a clock that is not the machine's for each sequence, on a real text's batches."""
    now, asked = [0.0], list[int]()

    async def evaluated(observer: object, text: MeasuredText, route: object, progress: object) -> Loss:
        asked.append(text.sequences)
        now[0] += 0.5 * text.sequences
        return Loss(2.0, 1, 1)

    class Routes:
        async def routes(self) -> list[list[PeerId]]:
            return [[]]

    monkeypatch.setattr("bootstrap.local.measuring.evaluate_route", evaluated)
    measuring = Measuring(plan_of(tmp_path), Summary(), lambda: now[0])
    batch = (torch.zeros(2, 4, dtype=torch.long),) * 2
    measuring._text = MeasuredText([batch] * 128, 2_048)
    observer: Observer = Routes()  # type: ignore[assignment]
    spent = 0.0
    for _ in range(20):
        before = now[0]
        await measuring.on_the_way(observer, 1)
        spent += now[0] - before
        now[0] += measuring.pause()
    assert asked == [FEWEST] * 20
    assert spent / now[0] == pytest.approx(SHARE)
