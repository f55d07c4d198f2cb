"""A GPU that fails for good ends its node with a sentence; nobody goes on sending to it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from node.process.daemon import Node
from protocol.errors import DeviceFailed
from tests.swarm.micro import FOREVER, everyone_goes_on, everyone_reaches, micro_swarm, run_swarm, until

XID = "CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported"
WITHIN = 5.0  # seconds, virtual


def fails_from_now_on(node: Node) -> None:
    """Have whatever is asked of the node's device raise what torch does after an Xid."""

    class Lost:
        def __getattr__(self, _: str) -> Any:
            raise RuntimeError(XID)

    def lost(*_: object, **__: object) -> Any:
        raise RuntimeError(XID)

    passes = node.replica.passes
    for name in ("forward", "backward", "last_stage", "evaluate"):
        setattr(passes, name, lost)
    node.replica.flat.values = node.replica.phi = Lost()  # type: ignore[assignment]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_node_whose_device_fails_ends_with_a_sentence_and_withdraws_its_record(
    stage: int, tmp_path: Path
) -> None:
    async def main() -> None:
        swarm = micro_swarm(directory=tmp_path, inner__total_steps=FOREVER)
        await swarm.start(replicas=2)
        await everyone_reaches(swarm, 2)
        dead, other = swarm.nodes[stage], swarm.nodes[1 - stage]
        began = asyncio.get_running_loop().time()
        fails_from_now_on(dead)

        def is_seen() -> bool:
            now = other.transport.now()
            return dead.transport.peer_id in other.view.serving(stage, now)

        assert is_seen()
        await until(lambda: swarm.tasks[stage].done(), 60, 0.1)
        assert asyncio.get_running_loop().time() - began < WITHIN
        ended = swarm.tasks[stage].exception()
        assert isinstance(ended, DeviceFailed)
        assert "CUDA error: unspecified launch failure" in str(ended)
        await until(lambda: not is_seen(), 60, 0.1)
        assert asyncio.get_running_loop().time() - began < WITHIN
        del swarm.nodes[stage], swarm.tasks[stage]
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())
