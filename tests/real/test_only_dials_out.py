"""Three nodes and nobody else, one of them behind a router that lets nobody in: the door keeps none of them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.daemons import NodeDaemon, SeedDaemon, wait_until
from tests.real.mapped_network import OUTSIDE, MappedNetwork, why_unavailable


@pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable())
@pytest.mark.timeout(240)
def test_a_node_that_only_dials_out_trains_and_averages(tmp_path: Path) -> None:
    """Its microbatches and its partner's contributions come over connections that it opened itself."""
    with MappedNetwork({}) as network:
        seed = SeedDaemon(tmp_path / "run", "--preset", "tiny", host="0.0.0.0", prefix=network.outside)
        join = seed.join_address(f"/ip4/{OUTSIDE}/")
        places = {
            "first": ("0", network.outside),
            "last": ("1", network.outside),
            "home": ("1", network.inside),
        }
        nodes = {
            name: NodeDaemon(tmp_path / name, "--join", join, "--stage", stage, host="0.0.0.0", prefix=prefix)
            for name, (stage, prefix) in places.items()
        }
        for node in nodes.values():
            node.wait_for_step(20)
        seed.kill()  # now they have nobody but each other
        before = {name: node.step for name, node in nodes.items()}
        for name, node in nodes.items():
            node.wait_for_step(before[name] + 60)
        for node in (nodes["home"], nodes["last"]):  # the only two of their stage
            rounds = len(node.events("round"))
            met = wait_until(lambda: [r for r in node.events("round")[rounds:] if r["partner"]])  # noqa: B023
            assert met, node.output
