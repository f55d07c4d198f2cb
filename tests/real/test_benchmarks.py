"""Every benchmark runs from beginning to end and prints the ratios that it promises: not what they are.

One that is new needs a line in `PROMISED`, and values for `--tiny` in its `arguments_of`.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from pipelines.chain import Chain, manifest_of

from tests.real.tiny_benchmarks import PATIENCE, PROMISED, ratios_of, scripts


@pytest.mark.timeout(PATIENCE + 30)
@pytest.mark.parametrize("script", scripts(are_virtual=False))
def test_a_tiny_run_prints_the_ratios_that_are_promised(script: Path) -> None:
    ratios = ratios_of(script)
    assert set(PROMISED[script.stem]) <= ratios.keys()
    assert all(map(math.isfinite, ratios.values()))


def test_a_chain_of_real_nodes_trains() -> None:
    with Chain(manifest_of(64, microbatches=2), [("127.0.0.1", [])] * 3) as chain:
        chain.wait_for_steps(2)
        assert chain.tokens_per_second(0.5) > 0
