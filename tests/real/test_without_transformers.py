"""A node and the run it belongs to do without transformers, as if it were not installed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LOADED = "print(sorted({'transformers.models', 'torch._dynamo', 'sympy'} & set(sys.modules)))\n"
WITHOUT = "import sys; sys.modules['transformers'] = None\n"


def done_without(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + program], capture_output=True, text=True, check=True
    )


@pytest.mark.parametrize(
    "modules",
    [
        "node.cli, node.process.daemon, node.process.serving",
        "bootstrap.found_cli, bootstrap.creating.run, bootstrap.creating.choosing",
        "bootstrap.inspect.status, bootstrap.inspect.doctor, bootstrap.inspect.link_map",
        "bootstrap.dashboard.running, bootstrap.lab.placement.plan_run, bootstrap.checking.report",
        "bootstrap.export.exporting, bootstrap.generation.writing, bootstrap.evaluation.measuring",
        "bootstrap.local.swarm",
    ],
)
def test_nothing_of_a_node_or_a_look_at_a_swarm_needs_it(modules: str) -> None:
    assert done_without(f"import {modules}; print('imported')").stdout.split()[-1] == "imported"


def test_a_swarm_trains_without_it_and_without_torchs_compiler() -> None:
    """Either is 70 to 100 MB of every node's memory, and seconds of its start."""
    done = done_without(
        "from bootstrap.tools_cli import app\n"
        "try:\n"
        "    app('simulate learning --steps 10 -k 5 --replicas 2 --seeds 0 --jobs 1 --json'.split())\n"
        "finally:\n"
        f"    {LOADED}"
    )
    [*outcomes, loaded] = done.stdout.splitlines()
    assert json.loads("".join(outcomes))["results"][0]["tokens"] == 5120
    assert loaded == "[]"


@pytest.mark.parametrize("stage", [0, 1])
def test_a_node_with_room_enough_begins_without_them_too(stage: int) -> None:
    """A rehearsal, there and back, in which nothing needs recomputing."""
    done = done_without(
        "from node.model.dry_run import dry_run\n"
        "from node.model.replica import Replica\n"
        "from protocol.run.manifest import load_preset\n"
        f"print(dry_run(Replica(load_preset('tiny'), {stage}), 'auto', 0).described())\n" + LOADED
    )
    told, loaded = done.stdout.splitlines()
    assert told.endswith("measured")
    assert loaded == "[]"
