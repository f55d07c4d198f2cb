"""One seed gives one run, event for event: no order may come from a set of names, which each process hashes anew."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.swarm.micro import FOREVER, everyone_reaches, micro_swarm, run_swarm, stage_nodes


def print_digest() -> None:
    """Let a stage die out and come back, and print a digest of all events; what the test below runs."""

    async def main() -> None:
        with tempfile.TemporaryDirectory() as folder:
            swarm = micro_swarm(inner__total_steps=FOREVER, directory=Path(folder))
            await swarm.start(2)
            await everyone_reaches(swarm, 5)
            last = stage_nodes(swarm, 1)
            for number in [number for number, one in swarm.nodes.items() if one in last]:
                swarm.kill(number)
            await asyncio.sleep(10)
            swarm.add(1, stage=1)
            swarm.add(5)
            await asyncio.sleep(15)
            await swarm.leave()
            events = json.dumps(swarm.events, default=str)
            print(len(swarm.events), hashlib.sha256(events.encode()).hexdigest())

    run_swarm(main())


def test_one_seed_gives_one_run_whatever_the_process_hashes() -> None:
    call = [sys.executable, "-c", "from tests.real.test_same_seed import print_digest; print_digest()"]
    said = [
        subprocess.run(
            call, env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True
        ).stdout.split()
        for seed in ("1", "3")
    ]
    assert int(said[0][0]) > 100
    assert said[0] == said[1]
