"""What the objects of nodes that train show of themselves, all of those that have a window."""

from __future__ import annotations

import gc
from pathlib import Path

from tests.swarm.micro import FOREVER, peer_of, run_swarm, training
from tests.unit.test_windows import with_windows

LONGEST = 400  # characters: a line or two of a terminal
SHOWN = {  # what no swarm in memory could do without
    "Answering", "Channel", "Checkpoints", "Compute", "Context", "Discovery", "Door", "Feed", "Healing", "Links",
    "MemoryNetwork", "MemoryTransport", "Node", "NodeResources", "Replica", "Rpc", "Service", "Snapshots",
    "StateDirectory", "Supervisor", "Trainer", "View",
}  # fmt: skip


def seen_since(before: set[int]) -> dict[str, list[str]]:
    """What everything that was made since then shows, by its class."""
    kinds, seen = set(with_windows()), dict[str, list[str]]()
    for one in gc.get_objects():
        for kind in type(one).__mro__[:-1] if id(one) not in before else ():
            if f"{kind.__module__}:{kind.__name__}" in kinds:
                seen.setdefault(kind.__name__, []).append(repr(one))
    return seen


def test_all_of_a_node_can_be_printed_while_it_trains(tmp_path: Path) -> None:
    before = {id(one) for one in gc.get_objects()}

    async def main() -> None:
        swarm = await training(2, step=2, inner__total_steps=FOREVER, directory=tmp_path)
        seen = seen_since(before)
        assert seen.keys() >= SHOWN
        for line in (line for lines in seen.values() for line in lines):
            assert line.startswith("<")
            assert line.endswith("]>")
            assert len(line) <= LONGEST, line
            assert "cannot be seen" not in line
            assert "\n" not in line
            assert "12D3Koo" not in line, "peer ids are shortened"
        node = swarm.nodes[0]
        peer, step, round_ = peer_of(node)[-8:], node.replica.step, node.replica.round
        assert repr(node).startswith(f"<Node [Peer: …{peer} | State: serving | Stage: 0 | Tasks: ")
        at = f"State: serving | Step: {step}, round {round_}"
        assert repr(node.service).startswith(f"<Service [Peer: …{peer} | Stage: 0 | {at} | Tasks: ")
        assert repr(node.checkpoints).startswith(f"<Checkpoints [Stage: 0 | To: {tmp_path / 'node-0'} | ")
        assert repr(node.context) == f"<Context [Peer: …{peer} | Run: micro | Stage: 0 of 2 | Name: -]>"
        assert repr(node.view) == "<View [Members: 2 at stage 0, 2 at stage 1 | Suspected: 0 of late]>"
        await swarm.leave()

    run_swarm(main())
