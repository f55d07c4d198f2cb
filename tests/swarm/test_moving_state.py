"""What a peer takes with it when it moves: the state of its new stage, in memory and on disk."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from protocol.errors import Refused
from protocol.messages.state import GetStatePiece
from tests.swarm.micro import events_of, guest_of, peer_of, run_swarm, stage_nodes, until
from tests.swarm.movers import LIFETIME, kill_half, one_moves, settled, somebody_moved


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_move_is_in_the_checkpoint_and_the_state_is_that_of_the_new_stage(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await settled(2, 3, directory=tmp_path)
        kill_half(swarm, 1)
        number = (await one_moves(swarm))["node"]
        mover = swarm.nodes[number]
        await somebody_moved(swarm)
        await asyncio.sleep(1)
        assert mover.surroundings.state is not None
        saved = mover.surroundings.state.checkpoint(mover.signed.run_id)
        assert saved is not None
        assert saved.stage == 1
        downloaded = events_of(swarm, "downloaded", node=number)[-1]
        assert saved.state.step >= downloaded["step"] > 0
        other = next(node for node in stage_nodes(swarm, 1) if node is not mover)
        assert saved.state.phi.numel() == other.replica.parameters
        assert saved.state.second_moment.any()
        guest = await guest_of(swarm)
        old_stage = GetStatePiece(stage=0, index=0, moments=False)
        with pytest.raises(Refused, match="other-stage"):
            await guest.call(peer_of(mover), old_stage, deadline=5.0)
        await until(lambda: bool(mover.context.counters.partners), seconds=3600, step=1.0)
        swarm.kill(number)
        await asyncio.sleep(LIFETIME)
        returned = swarm.add(number)
        await until(lambda: returned.public_state == "serving", step=1.0)
        assert returned.context.stage == 1
        assert peer_of(returned) == peer_of(mover)
        await swarm.leave()

    run_swarm(main())
