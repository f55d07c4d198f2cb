"""A swarm under the virtual clock is the same in another process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

from node.model.replica import Replica, digest_of
from tests.swarm.micro import (
    run_swarm,
    trained,
)


def fingerprint_of_a_run() -> str:
    swarm = run_swarm(trained(2, inner__total_steps=10))
    log = hashlib.sha256(repr(swarm.events).encode()).hexdigest()
    return f"{log} {digest_of([Replica(swarm.manifest, 0).phi]).hex()}"


def test_another_process_draws_the_same_weights_and_sees_the_same_run() -> None:
    script = (
        "import torch; torch.set_num_threads(1); "
        "from tests.real.test_same_run_elsewhere import fingerprint_of_a_run; print(fingerprint_of_a_run())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    there = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    assert there.stdout.strip() == fingerprint_of_a_run()
