"""An export that cannot be made says what failed, with whom, and leaves no folder behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootstrap.export.exporting import export
from bootstrap.export.order import ExportOrder
from protocol.errors import JoinError, Refused
from protocol.messages.state import GetStateIndex
from protocol.rpc.rpc import Answer, Request
from tests.swarm.micro import observer_of, peer_of, run_swarm, training


def test_an_answer_that_fails_is_told_with_the_peer_that_gave_it(tmp_path: Path) -> None:
    async def refuse(request: Request) -> Answer:
        raise Refused("busy", "its checkpoint is being written")

    async def main() -> None:
        swarm = await training(1, step=1)
        swarm.nodes[0].rpc.handle(GetStateIndex.answered_by(refuse))
        observer = await observer_of(swarm)
        with pytest.raises(JoinError, match="its checkpoint is being written") as failure:
            await export(observer, ExportOrder(tmp_path / "model"))
        assert f"…{peer_of(swarm.nodes[0])[-8:]}: " in str(failure.value)
        assert "No live peer" not in str(failure.value)
        await swarm.leave()

    run_swarm(main())
