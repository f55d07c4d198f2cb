"""As test_benchmarks.py, of the benchmarks that run in virtual time: other tests beside them change nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.real.tiny_benchmarks import PATIENCE, PROMISED, ratios_of, scripts


@pytest.mark.timeout(PATIENCE + 30)
@pytest.mark.parametrize("script", scripts(are_virtual=True))
def test_a_tiny_run_prints_the_ratios_that_are_promised(script: Path) -> None:
    ratios = ratios_of(script)
    assert set(PROMISED[script.stem]) <= ratios.keys()
    assert all(map(math.isfinite, ratios.values()))
