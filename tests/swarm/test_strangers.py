"""A stranger without a record: it looks, evaluates and exports, and trains nobody."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from protocol.codecs.codec import encode
from protocol.errors import Refused
from protocol.messages.training import Forward, Propose
from tests.swarm.micro import (
    FOREVER,
    everyone_goes_on,
    guest_of,
    peer_of,
    run_swarm,
    stage_nodes,
    training,
)

TIMES: dict[str, Any] = {"opens_in": 0.5, "due_in": 1.0, "ends_in": 1.5, "step_seconds": 0.1}


def test_labels_of_a_stranger_train_no_last_stage() -> None:
    """Failed before: 891 microbatches in 25 s."""

    async def main() -> None:
        swarm = await training(2, inner__total_steps=FOREVER)
        last = stage_nodes(swarm, 1)[0]
        stranger = await guest_of(swarm)
        labels = torch.zeros(2, 32, dtype=torch.int32)
        parcel = [encode(torch.randn(2, 32, 16), "fp32"), encode(labels, "int32")]
        for number in range(20):
            message = Forward(microbatch=f"{number}", stage=1)
            with pytest.raises(Refused, match="stranger"):
                await stranger.call(peer_of(last), message, parcel, deadline=30.0)
            with pytest.raises(Refused, match="stranger"):
                await stranger.call(
                    peer_of(last), Propose(stage=1, round=1, pair="p", **TIMES), deadline=30.0
                )
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())
