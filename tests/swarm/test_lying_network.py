"""Simulated attackers that lie in answers, requests and records: each does what it is named for, the others go on."""

from __future__ import annotations

import pytest

from bootstrap.lab.simulation.crowd import Crowd
from bootstrap.lab.simulation.lying_network import FalseRecords, LyingRpc
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from tests.swarm.micro import WIDE, micro_corpus, micro_manifest, run_swarm, step_of, until

REPLICAS = 2
STEPS = 20


@pytest.mark.parametrize(
    "kind", ["odd-answers", "holding", "false-stats", "silent", "flooding", "false-records"]
)
def test_the_honest_train_to_the_end_beside_a_liar_and_blame_it_alone(kind: str) -> None:
    async def main() -> None:
        manifest = micro_manifest(inner__total_steps=STEPS)
        swarm = SimulatedSwarm(manifest, micro_corpus(), 2, WIDE)
        crowd = Crowd(swarm, kind, 1 / REPLICAS)
        await swarm.seed_peer.start()
        for number in range(REPLICAS * manifest.stages):
            crowd.add(number, REPLICAS)
        honest = [node for number, node in swarm.nodes.items() if number not in crowd.attackers]
        await until(lambda: all(node.public_state == "finished" for node in honest), 600, 0.1)
        for (
            node
        ) in honest:  # the last stage ends with the first; how many steps it did depends on how it was drawn
            assert step_of(node) >= (STEPS if node.context.stage == 0 else STEPS // 4)
        assert crowd.findings().blamed == 0
        for number in crowd.attackers:
            liar = swarm.nodes[number]
            if isinstance(liar.rpc, LyingRpc):
                assert liar.rpc.lied
            else:
                assert isinstance(liar.transport, FalseRecords)
        await swarm.leave()

    run_swarm(main())
