"""The best loss so far, and a present one above it: a jump is shown as a jump, noise is not, a new life knows it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bootstrap.inspect.losses import best_told
from bootstrap.inspect.seen import Finding, Seen, Severity
from bootstrap.inspect.verdict import verdict
from node.context import Context
from node.service.kept_best import FACT, KeptBest, best_in
from node.storage.state_directory import StateDirectory
from node.watch.loss_history import BEST_STEPS, RECENT_STEPS, LossHistory, has_jumped
from node.watch.pulse import loss_in_words, sentence
from node.watch.words import clock_time
from protocol.messages.peers import LossBest, LossTrend
from tests.unit.test_telling import PULSE
from tests.unit.test_verdict import FALLS, RISES, node, pairs

NOON = 1_800_014_400.0
BEST = LossBest(3.62, NOON - 600.0, 0.02)


def taken(losses: list[float], history: LossHistory | None = None, start: int = 0) -> LossHistory:
    history = history or LossHistory()
    for step, loss in enumerate(losses):
        history.note(float(start + step), loss)
    return history


def noisy(mean: float, steps: int, deviation: float = 0.2, seed: int = 1) -> list[float]:
    generator = random.Random(seed)
    return [mean + generator.gauss(0.0, deviation) for _ in range(steps)]


def test_the_best_is_a_mean_of_many_steps_with_the_time_of_the_last_of_them() -> None:
    assert taken([5.0] * (RECENT_STEPS - 1)).best(29.0, NOON) is None
    history = taken([*[4.0] * 200, 1.0, *[5.0] * 100])
    best = history.best(300.0, NOON)
    assert best is not None
    assert best.loss == pytest.approx(4.0 - 3.0 / BEST_STEPS)  # one lucky step moves it little
    assert best.time == NOON - 100.0


def test_a_step_that_is_no_number_does_not_spoil_it() -> None:
    best = taken([*[4.0] * 50, float("nan"), float("inf"), *[4.0] * 50]).best(101.0, NOON)
    assert best is not None
    assert (best.loss, best.error) == (4.0, 0.0)


def test_a_loss_that_jumps_is_seen_within_ten_steps_until_it_is_back() -> None:
    history = taken([5.9 - step / 200 for step in range(400)])
    before = history.best(399.0, NOON)
    assert not has_jumped(history.recent(), before)
    taken(noisy(7.0, 10), history, 400)
    best = history.best(409.0, NOON)
    assert has_jumped(history.recent(), best)
    assert best is not None
    assert before is not None
    assert best.loss == before.loss
    taken(noisy(5.2, 100), history, 410)
    assert has_jumped(history.recent(), history.best(509.0, NOON))
    taken(noisy(before.loss, 100), history, 510)
    assert not has_jumped(history.recent(), history.best(609.0, NOON))


@pytest.mark.parametrize("deviation", [0.05, 0.3, 0.6])
def test_noise_is_no_jump(deviation: float) -> None:
    history = LossHistory()
    for step, loss in enumerate(noisy(2.0, 5_000, deviation)):
        history.note(float(step), loss)
        assert not has_jumped(history.recent(), history.best(float(step), NOON))


# --- the sentence -------------------------------------------------------------------------------


def test_status_and_page_show_a_jump_and_no_learning_beside_it() -> None:
    told = "loss 5.21, was 3.62 at " + clock_time(BEST.time, NOON)
    swarm = pairs(2, trend=FALLS, loss=5.21, best=BEST)
    assert verdict(Seen(2, swarm, version="0.1.0", now=NOON)) == [
        Finding(Severity.WARNING, "loss-jumped", told, time=BEST.time)
    ]
    lasting = verdict(Seen(2, pairs(2, trend=RISES, loss=5.21, best=BEST), version="0.1.0", now=NOON))
    assert [(found.severity, found.sentence) for found in lasting] == [(Severity.ALARM, told)]
    (well,) = verdict(Seen(2, pairs(2, trend=FALLS, loss=3.7, best=BEST), version="0.1.0", now=NOON))
    assert well.kind == "learning"


def test_line_and_panel_of_the_node_show_it_in_the_same_words() -> None:
    pulse = replace(PULSE, loss=5.21, best=BEST, time=NOON)
    assert loss_in_words(pulse) == f"loss 5.21, was 3.62 at {clock_time(BEST.time, NOON)}"
    assert f", {loss_in_words(pulse)}, " in sentence(pulse)
    assert loss_in_words(replace(pulse, loss=3.7)) == "loss 3.214 (3.301 5.0 min ago)"


def test_a_replica_that_came_after_the_jump_does_not_hide_it() -> None:
    swarm = [*pairs(1), node(1, loss=5.2, best=BEST), node(1, 1, loss=5.2, best=LossBest(5.1, NOON, 0.02))]
    assert "loss-jumped" in {found.kind for found in verdict(Seen(2, swarm, now=NOON))}
    newcomer = [*pairs(1), node(1, 1, loss=5.2, best=LossBest(5.1, NOON, 0.02)), node(1, 2)]
    assert "loss-jumped" not in {found.kind for found in verdict(Seen(2, newcomer, now=NOON))}
    assert "loss-jumped" in {found.kind for found in verdict(Seen(2, newcomer, now=NOON, best=BEST))}


def test_one_that_lies_of_three_neither_makes_a_jump_nor_is_believed_for_the_best() -> None:
    honest = [node(1, n, loss=3.7, best=BEST, trend=LossTrend(60.0, 4.0, 3.7, 0.01)) for n in range(2)]
    liar = node(1, 2, loss=900.0, best=LossBest(-1e15, NOON))
    found = verdict(Seen(2, [*pairs(1), *honest, liar], version="0.1.0", now=NOON))
    assert {finding.kind for finding in found} == {"learning"}
    stats = [sighting.stats for sighting in (*honest, liar) if sighting.stats is not None]
    assert best_told(stats) == BEST
    assert best_told([]) is None


# --- another life -------------------------------------------------------------------------------


def context(losses: LossHistory, run: str = "run") -> Context:
    clocks: dict[str, Any] = {
        "view": SimpleNamespace(elapsed=lambda: 1_000.0),
        "transport": SimpleNamespace(now=lambda: NOON),
    }
    counters = SimpleNamespace(losses=losses)
    return cast(Context, SimpleNamespace(run_id=run, counters=counters, **clocks))


def test_a_node_that_was_started_again_knows_the_best_of_its_run(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    state.remember(port=31337)
    first = KeptBest(state)
    first.recall(context(LossHistory()))
    first.save(context(taken([4.0] * 500)))
    assert state.facts() == {"port": 31337, FACT: {"run": "run", "loss": 4.0, "time": NOON - 971.0}}
    for run, known in (("run", True), ("another", False)):
        losses = taken([7.0] * 40)
        KeptBest(state).recall(context(losses, run))
        assert has_jumped(losses.recent(), losses.best(1_000.0, NOON)) is known


@pytest.mark.parametrize("fact", [None, 3, [], {"run": "run"}, {"run": "run", "loss": "x", "time": 1}])
def test_a_damaged_fact_is_none(fact: object) -> None:
    assert best_in(fact, "run") is None
