"""What the nodes say about how far apart they are, against the weights of all replicas side by side."""

from __future__ import annotations

import asyncio

import pytest

from tests.swarm.micro import all_reached, micro_swarm, run_swarm, stage_nodes, true_spread, until

REPLICAS = 5
FOREVER = 100_000


@pytest.mark.long
def test_the_live_estimate_is_within_ten_per_cent_of_the_true_spread() -> None:
    """Means of squares over a dozen seconds: each estimate rests on eight meetings, so one alone is worth 25 %."""

    async def main() -> tuple[float, float, float]:
        swarm = micro_swarm(
            stages=1, inner__total_steps=FOREVER, inner__learning_rate=2e-3, inner__min_learning_rate=2e-3
        )
        await swarm.start(REPLICAS)
        await until(lambda: all_reached(swarm.nodes.values(), 60))
        true, estimated, expected = [], [], []
        for _ in range(60):
            await asyncio.sleep(0.2)
            nodes = stage_nodes(swarm, 0)
            true.append(true_spread(nodes) ** 2)
            estimated += [node.context.counters.spread or 0.0 for node in nodes]
            expected += [node.context.counters.expected_spread or 0.0 for node in nodes]
        await swarm.leave()
        return (
            (sum(true) / len(true)) ** 0.5,
            (sum(value**2 for value in estimated) / len(estimated)) ** 0.5,
            (sum(value**2 for value in expected) / len(expected)) ** 0.5,
        )

    true, estimated, expected = run_swarm(main())
    print(f"spread: true {true:.3e}, estimated {estimated:.3e}, by theory {expected:.3e}")
    assert estimated == pytest.approx(true, rel=0.1)
    assert expected == pytest.approx(true, rel=0.35)  # the theory knows independent noise and pairs of all
