"""The swarm as events (`noloco simulate swarm`) against whole daemons with real frames and tensors."""

from __future__ import annotations

import pytest
from levels import as_events, whole_daemons


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("peers", "minutes"), [(16, 5.0), (64, 4.0)])
def test_both_levels_of_detail_agree(peers: int, minutes: float) -> None:
    """benchmarks/levels.py compares larger ones."""
    whole, events = whole_daemons(peers // 2, minutes), as_events(peers // 2, minutes)
    print(f"{peers} peers: daemons {whole}, events {events}")
    assert events.throughput == pytest.approx(whole.throughput, rel=0.1)
    assert events.rounds == pytest.approx(whole.rounds, rel=0.1)
    assert events.alone == pytest.approx(whole.alone, abs=0.05)
    assert events.blocked == pytest.approx(whole.blocked, abs=0.02)
