"""The in-memory network tells the same story in another process."""

from __future__ import annotations

import os
import subprocess
import sys


def test_the_story_does_not_depend_on_the_process() -> None:
    """Sets and hashes of strings have another order in each process; nothing may follow it."""
    program = "from tests.swarm.test_memory_network import story; print(story(1))"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **environment, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
