"""How many replicas of all-reduce learn as much: read off its curve, and nothing beyond it."""

from __future__ import annotations

import pytest

from bootstrap.lab.simulation.effective import AllReduceCurves
from bootstrap.lab.simulation.learning import LearningResult
from bootstrap.lab.simulation.study import rows, tables_of

ALL_REDUCE = {2: 1.676, 4: 1.478, 8: 1.355, 16: 1.261}


def result(method: str, replicas: int, loss: float, seed: int = 0, **facts: object) -> LearningResult:
    alike = {"stages": 1, "steps": 1000, "microbatches": 1, "sequences": 2, "validation_sequences": 512}
    shown = {"activations": "fp32", "gradients": "fp32", "gossip": "mod3", "k": 4}
    setting = {"method": method, "replicas": replicas, "seed": seed, **alike, **shown, **facts}
    return LearningResult(key=f"{setting}", setting=setting, loss=loss, losses=[loss])


CURVE = [result("all-reduce", replicas, loss) for replicas, loss in ALL_REDUCE.items()]


@pytest.mark.parametrize(
    ("loss", "replicas"), [(1.495, 3.8), (1.449, 4.7), (1.478, 4.0), (1.676, 2.0), (1.7, None), (1.2, None)]
)
def test_a_loss_lies_between_two_numbers_of_all_reduces(loss: float, replicas: float | None) -> None:
    found = AllReduceCurves(CURVE).effective([result("noloco", 8, loss)])
    assert found == (None if replicas is None else pytest.approx(replicas, abs=0.05))


def test_of_several_rates_the_best_counts_and_seeds_are_averaged() -> None:
    curve = [*CURVE, result("all-reduce", 8, 1.5, rate=0.1), result("all-reduce", 8, 1.345, seed=1)]
    assert AllReduceCurves(curve).effective([result("noloco", 8, 1.35)]) == pytest.approx(8.0)


def test_runs_of_another_length_or_a_single_number_say_nothing() -> None:
    assert AllReduceCurves(CURVE).effective([result("noloco", 8, 1.4, steps=4000)]) is None
    assert AllReduceCurves(CURVE[:1]).effective([result("noloco", 8, 1.676)]) is None


def test_the_table_has_it_where_it_is_known() -> None:
    known, unknown = ([*CURVE, result("noloco", 8, 1.495)], [result("noloco", 8, 1.495), CURVE[0]])
    assert rows(known)[-1]["effective"] == pytest.approx(3.8, abs=0.05)
    assert "learns like" in [column.header for column in tables_of(known)[0].columns]
    assert "learns like" not in [column.header for column in tables_of(unknown)[0].columns]
