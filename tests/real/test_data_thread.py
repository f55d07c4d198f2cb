"""The thread that makes microbatches, and a process that it must not keep."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from node.data.batches import Batch, Position, TokenisingTally, TrainingData
from node.data.prefetch import Feed, FeedReport
from node.watch.events import Events
from protocol.errors import DataError
from protocol.manifest import Manifest
from tests.swarm.micro import micro_manifest

MANIFEST = micro_manifest()


COUNT = MANIFEST.inner.microbatches


def microbatch(number: int) -> Batch:
    return torch.tensor(number), torch.tensor(number)


@dataclass
class Numbers:
    """Microbatch n holds nothing but n."""

    identity: str = "numbers"
    seconds: float = 0.0  # that one takes to make
    ends_at: int = 10**9
    made: int = 0

    def require(self, tokens: int) -> None: ...

    def validation_batches(self, tokens: int, sequences: int, limit: int | None = None) -> Iterator[Batch]:
        return (microbatch(number) for number in range(1 if limit is None else limit))

    def batches(
        self, run_id: str, peer_id: str, manifest: Manifest, position: Position, tally: TokenisingTally
    ) -> Iterator[tuple[Batch, Position]]:
        for number in range(position.document, 10**9):
            if number >= self.ends_at:
                raise DataError("The disk is gone. Put it back.")
            time.sleep(self.seconds)
            self.made += 1
            tally.documents, tally.nbytes = tally.documents + 1, tally.nbytes + 4
            tally.tokens, tally.seconds = tally.tokens + 1, tally.seconds + 0.001
            yield microbatch(number), Position(self.identity, 0, number + 1)


def feed_of(data: Numbers, position: Position | None = None) -> Feed:
    feed = Feed(cast("TrainingData", data), "run", "peer", MANIFEST, position)
    feed.begin()
    return feed


async def test_waiting_for_data_is_told() -> None:
    data, events = Numbers(seconds=0.02), list[dict[str, Any]]()
    feed = feed_of(data)
    report = FeedReport(feed, Events(time.time, events.append))
    report._next = 0.0
    for _ in range(5):
        await feed.take(COUNT)
        report.tell()
    assert feed.waited() > 0.2  # much more where this machine has nothing else to do
    (event,) = events
    assert event["event"] == "data"
    assert (event["tokens_per_second"], event["bytes_per_second"]) == (1000, 4000)
    assert event["waited_fraction"] > 0.2
    feed.close()


def test_work_that_waits_for_its_source_keeps_no_process() -> None:
    code = (
        "import time; from node.machine.processes import BackgroundThread; thread = BackgroundThread('data'); "
        "assert thread.submit(int, '7').result() == 7; "
        "thread.submit(time.sleep, 3600); thread.shutdown(wait=False)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
