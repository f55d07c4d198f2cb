"""Ctrl-C while a large corpus is read for the first time: nobody waits for the rest of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bootstrap.local.nodes import LocalPlan
from bootstrap.local.progress import StatusLine
from bootstrap.local.swarm import LocalSwarm
from node.machine.processes import in_background
from protocol.run.manifest import load_preset
from tests.patience import patience

BUSY_IN_TORCH = """
import threading
import torch, typer
from node.command import App
from node.machine.processes import BackgroundThread

app, begun, large = App(), threading.Event(), torch.ones(512, 512)

def compute():
    while True:
        torch.mm(large, large)
        begun.set()

@app.command()
def end_meanwhile():
    BackgroundThread("computing").submit(compute)
    begun.wait()
    raise typer.Exit(3)

app()
"""
LONG = 60.0  # seconds that the reading would take: the test would time out


class EndlessCorpus:
    """Whoever reads it is still there until the test ends it."""

    def __init__(self) -> None:
        self.begun, self.end = threading.Event(), threading.Event()

    def read(self, *_: Any) -> None:
        self.begun.set()
        self.end.wait(LONG)

    async def wait_for_reader(self) -> None:
        await asyncio.to_thread(self.begun.wait)


@pytest.fixture
def corpus() -> Iterator[EndlessCorpus]:
    made = EndlessCorpus()
    yield made
    made.end.set()


@pytest.mark.timeout(300)
def test_an_event_loop_ends_without_the_reader(corpus: EndlessCorpus) -> None:
    async def main() -> None:
        reading = asyncio.create_task(in_background("data", corpus.read))
        await corpus.wait_for_reader()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(main())
    assert corpus.begun.is_set()
    assert not corpus.end.is_set()


def test_results_and_errors_come_back() -> None:
    async def main() -> None:
        assert await in_background("data", divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await in_background("data", divmod, 7, 0)

    asyncio.run(main())


@pytest.mark.timeout(300)
def test_a_local_swarm_ends_and_starts_no_node(
    corpus: EndlessCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootstrap.local.measuring.open_data", corpus.read)
    summary = tmp_path / "summary.json"

    async def main() -> None:
        plan = LocalPlan(load_preset("tiny"), 1, tmp_path / "swarm", 1.0, 8, summary, None, None)
        swarm = LocalSwarm(plan, Console(quiet=True), StatusLine(lambda _: None))
        running = asyncio.create_task(swarm.run())
        await corpus.wait_for_reader()
        swarm.stop()
        told = (await running).lines()
        assert told == ["The swarm ended before a loss was measured."]

    asyncio.run(main())
    assert not json.loads(summary.read_text())["nodes"]
    assert not corpus.end.is_set()


@pytest.mark.timeout(patience(120))
def test_a_command_ends_while_a_thread_is_in_torch() -> None:
    """Python takes such a thread apart at the end, which aborted the process: exit code 134."""
    done = subprocess.run(
        [sys.executable, "-c", BUSY_IN_TORCH],
        capture_output=True,
        text=True,
        check=False,
        timeout=patience(100),
    )
    assert (done.returncode, done.stderr) == (3, "")
