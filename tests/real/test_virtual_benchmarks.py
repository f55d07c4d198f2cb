"""As test_benchmarks.py, of the benchmarks that run in virtual time: other tests beside them change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.tiny_benchmarks import PATIENCE, require_promised, scripts


@pytest.mark.timeout(PATIENCE + 30)
@pytest.mark.parametrize("script", scripts(are_virtual=True))
def test_a_tiny_run_prints_the_ratios_that_are_promised(script: Path) -> None:
    require_promised(script)
