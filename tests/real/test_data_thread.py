"""The thread that makes microbatches, and a process that it must not keep."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from node.data.batches import Batch, TokenisingTally, TrainingData
from node.data.documents import Split
from node.data.prefetch import FeedReport
from node.storage.position import Position
from node.watch.events import Events
from protocol.run.manifest import Manifest
from tests.swarm.micro import MadeUpDocuments
from tests.unit.test_feed import COUNT, Numbers, WatchedTokenizer, feed_of


@dataclass
class SlowNumbers(Numbers):
    """Each takes `seconds` to make."""

    seconds: float = 0.02

    def batches(
        self, run_id: str, peer_id: str, manifest: Manifest, position: Position, tally: TokenisingTally
    ) -> Iterator[tuple[Batch, Position]]:
        for made in super().batches(run_id, peer_id, manifest, position, tally):
            time.sleep(self.seconds)
            yield made


async def test_waiting_for_data_is_told() -> None:
    data, events = SlowNumbers(), list[dict[str, Any]]()
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


async def test_text_is_tokenised_in_a_thread_of_its_own() -> None:
    tokenizer = WatchedTokenizer()
    texts = [f"text {number} " * 20 for number in range(64)]
    feed = feed_of(TrainingData(MadeUpDocuments(texts, Split(0.0)), tokenizer))
    await feed.take(COUNT)
    feed.close()
    (thread,) = {thread for thread, _ in tokenizer.seen}
    assert thread != threading.get_ident()


def test_work_that_waits_for_its_source_keeps_no_process() -> None:
    code = (
        "import time; from node.machine.processes import BackgroundThread; thread = BackgroundThread('data'); "
        "assert thread.submit(int, '7').result() == 7; "
        "thread.submit(time.sleep, 3600); thread.shutdown(wait=False)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
