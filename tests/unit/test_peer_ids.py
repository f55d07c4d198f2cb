"""What is a peer id in a message, and what is not."""

from __future__ import annotations

import pytest

from protocol.errors import WireError
from protocol.messages import Message
from protocol.messages.peers import NodeStats
from protocol.messages.training import Evaluate, Forward, Predict, Return, RollCall
from protocol.records.identity import Identity, peer_id_of

PEER = Identity.from_seed("a peer").peer_id


@pytest.mark.parametrize("key", [bytes(32), b"\xff" * 32, bytes(range(32))])
def test_ids_of_all_keys_are_ids(key: bytes) -> None:
    assert Return(microbatch="a", home=peer_id_of(key), draw="").home == peer_id_of(key)


NO_IDS = [
    "x",
    "12D3Koo",
    PEER[:-1],
    f"{PEER}1",
    f"{PEER[:-1]}0",
    f"12D3Koo{45 * 'z'}",
    f"12D3KooW{44 * '1'}",
    f"{PEER}\n",
]


@pytest.mark.parametrize("text", NO_IDS)
def test_fields_that_name_peers_take_nothing_else(text: str) -> None:
    cases: list[tuple[type[Message], dict[str, object]]] = [
        (Return, {"microbatch": "a", "home": text, "draw": "b"}),
        (Forward, {"microbatch": "a", "stage": 1, "home": text}),
        (Evaluate, {"stage": 0, "route": [PEER, text]}),
        (Predict, {"stage": 0, "route": [text], "answer": "a", "position": 0, "top": 1}),
        (RollCall, {"name": "a", "members": [text]}),
        (NodeStats, {"stage": 0, "state": "serving", "step": 0, "round": 0, "partner": text}),
        (NodeStats, {"stage": 0, "state": "serving", "step": 0, "round": 0, "sent": {text: 1}}),
    ]
    for kind, body in cases:
        with pytest.raises(WireError, match="not a peer id"):
            kind.parsed(body)
