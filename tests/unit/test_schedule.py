"""The learning rate: linear warm-up, then a cosine down to the minimum."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.model.inner import learning_rate
from protocol.run.manifest import Inner, load_preset

PUBLISHED = load_preset("llama-125m").inner


def inner(warmup: int, total: int, peak: float = 6e-4, least: float = 6e-5) -> Inner:
    changes = {
        "warmup_steps": warmup, "total_steps": total, "learning_rate": peak, "min_learning_rate": least
    }  # fmt: skip
    return Inner.model_validate({**PUBLISHED.model_dump(), **changes})


def test_the_published_schedule_at_its_corners() -> None:
    assert learning_rate(PUBLISHED, 0) == pytest.approx(6e-7)
    assert learning_rate(PUBLISHED, 999) == pytest.approx(6e-4)
    assert learning_rate(PUBLISHED, 1_000) == pytest.approx(6e-4)
    assert learning_rate(PUBLISHED, 13_000) == pytest.approx(3.3e-4)  # half way down the cosine
    assert learning_rate(PUBLISHED, 25_000) == pytest.approx(6e-5)


@given(total=st.integers(2, 500), data=st.data())
def test_it_rises_then_falls_and_stays_within_its_bounds(total: int, data: st.DataObject) -> None:
    settings = inner(data.draw(st.integers(0, total - 1)), total)
    rates = [learning_rate(settings, step) for step in range(total + 50)]
    peak = max(0, settings.warmup_steps - 1)
    assert all(a < b for a, b in pairwise(rates[: peak + 1]))
    assert all(a >= b - 1e-18 for a, b in pairwise(rates[peak:]))
    assert max(rates) == pytest.approx(6e-4)
    assert min(rates) > 0


def test_it_holds_the_minimum_beyond_the_last_step() -> None:
    settings = inner(10, 100)
    assert learning_rate(settings, 100) == learning_rate(settings, 10**9) == pytest.approx(6e-5)


def test_without_warm_up_it_begins_at_the_peak() -> None:
    assert learning_rate(inner(0, 100), 0) == pytest.approx(6e-4)


def test_equal_rates_give_a_constant() -> None:
    settings = inner(0, 100, peak=1e-3, least=1e-3)
    assert {learning_rate(settings, step) for step in range(120)} == {1e-3}
