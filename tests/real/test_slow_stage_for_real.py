"""The last stage takes 15 s a microbatch, deadlines are 6 s: real nodes train, and compute nothing in vain.

Ninety seconds and more are in tests/swarm/test_slow_stage.py, under the virtual clock.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.daemons import NodeDaemon, SeedDaemon
from tests.real.slow_node import SECONDS

STEPS = 2
MANIFEST = f"""
name = "slow"
stages = 2

[model]
vocab_size = 256
hidden_size = 32
layers = 2
heads = 2
intermediate_size = 64

[data]
source = "python-stdlib"
sequence_tokens = 32

[inner]
learning_rate = 2e-3
min_learning_rate = 2e-4
warmup_steps = 1
total_steps = {STEPS}
microbatches = 1
sequences = 1

[outer]
alpha = 0.5
beta = 0.7
gamma = 0.7
inner_steps = 10

[limits]
microbatch_deadline = 6.0
"""
TO_SERVE = 300.0  # seconds at most, on a machine that may have other things to do
PATIENCE = 4 * SECONDS + 120


@pytest.mark.timeout(900)
def test_a_stage_slower_than_every_deadline_trains_without_a_resend(tmp_path: Path) -> None:
    (tmp_path / "slow.toml").write_text(MANIFEST, encoding="utf-8")
    seed = SeedDaemon(tmp_path / "run", "--manifest", str(tmp_path / "slow.toml"))
    address = seed.join_address()
    last, first = (
        [
            NodeDaemon(
                tmp_path / f"{stage}-{n}", "--join", address, "--stage", str(stage), module="slow_node"
            )
            for n in range(2)
        ]
        for stage in (1, 0)
    )
    for node in [*first, *last]:
        node.wait_for_event("serving", TO_SERVE)
    for node in first:
        node.wait_for_step(STEPS, PATIENCE)
    for node in [*first, *last]:
        node.wait_for_event("finished")
        assert not node.events("resend"), node.output
    # each microbatch that the last stage computed is one whose gradient arrived
    assert sum(len(node.events("step")) for node in last) == len(first) * STEPS
    for node in [*last, *first, seed]:
        assert node.leave() == 0
