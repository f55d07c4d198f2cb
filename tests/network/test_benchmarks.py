"""The benchmarks' own swarm starts, and every benchmark has its settings: not what they measure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from pipelines.chain import Chain, manifest_of  # noqa: E402


@pytest.mark.long
@pytest.mark.parametrize("script", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: str(path.stem))
def test_each_tells_its_settings(script: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout


def test_a_chain_of_real_nodes_trains() -> None:
    with Chain(manifest_of(64, microbatches=2), [("127.0.0.1", [])] * 3) as chain:
        chain.wait_for_steps(2)
        assert chain.tokens_per_second(0.5) > 0
