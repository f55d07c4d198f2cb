"""The feed: microbatches ready before they are asked for, and what was trained on counted step by step."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from node.data.batches import Batch, Position, TokenisingTally, TrainingData
from node.data.prefetch import Feed, FeedReport, microbatches_ahead
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
    tally: TokenisingTally = field(default_factory=TokenisingTally)
    made: int = 0

    def require(self, tokens: int) -> None: ...

    def validation_batches(self, tokens: int, sequences: int, limit: int | None = None) -> Iterator[Batch]:
        return (microbatch(number) for number in range(1 if limit is None else limit))

    def batches(
        self, run_id: str, peer_id: str, manifest: Manifest, position: Position
    ) -> Iterator[tuple[Batch, Position]]:
        for number in range(position.document, 10**9):
            if number >= self.ends_at:
                raise DataError("The disk is gone. Put it back.")
            time.sleep(self.seconds)
            self.made += 1
            self.tally.documents, self.tally.nbytes = self.tally.documents + 1, self.tally.nbytes + 4
            self.tally.tokens, self.tally.seconds = self.tally.tokens + 1, self.tally.seconds + 0.001
            yield microbatch(number), Position(self.identity, 0, number + 1)


def feed_of(data: Numbers, position: Position | None = None) -> Feed:
    feed = Feed(cast("TrainingData", data), "run", "peer", MANIFEST, position)
    feed.begin()
    return feed


async def ready(feed: Feed) -> None:
    await asyncio.wait(feed._coming, timeout=30)
    assert all(future.done() for future in feed._coming)


def numbers(batches: list[Batch]) -> list[int]:
    return [int(inputs) for inputs, _ in batches]


async def test_microbatches_are_made_before_they_are_asked_for() -> None:
    data = Numbers(seconds=0.002)
    feed = feed_of(data)
    await ready(feed)
    assert numbers(await feed.take(COUNT)) == list(range(COUNT))
    assert feed.seconds_waited < 0.005
    await ready(feed)
    assert data.made == microbatches_ahead(MANIFEST) + COUNT  # and no more than that is held
    feed.close()


def test_as_many_as_cover_what_is_tokenised_at_once_but_not_thousands_of_small_ones() -> None:
    sizes = {"data__sequence_tokens": 1_024, "inner__sequences": 8}
    assert microbatches_ahead(micro_manifest(**sizes)) == 32
    assert microbatches_ahead(micro_manifest(**sizes, inner__microbatches=64)) == 128
    assert microbatches_ahead(MANIFEST) == 64


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


async def test_only_what_was_trained_on_counts() -> None:
    feed = feed_of(Numbers())
    first, second = await feed.take(COUNT), await feed.take(COUNT)  # the second is drawn ahead
    assert feed.position(0) == feed.position(9) == Position("numbers")
    feed.commit(step=7)
    assert feed.position(6) == Position("numbers")  # its weights may be saved while the step is computed
    assert feed.position(7) == Position("numbers", 0, COUNT)
    feed.begin()  # as after a while at another stage
    assert numbers(await feed.take(COUNT)) == numbers(second) != numbers(first)
    feed.close()
    other = feed_of(Numbers(), Position("numbers", 0, 5))
    assert numbers(await other.take(2)) == [5, 6]
    other.close()
    changed = feed_of(Numbers(), Position("other data", 0, 5))
    assert numbers(await changed.take(2)) == [0, 1]
    changed.close()


async def test_data_that_break_off_say_why() -> None:
    feed = feed_of(Numbers(ends_at=3))
    with pytest.raises(DataError, match="disk is gone"):
        await feed.take(4)
    feed.begin()
    feed.close()


def test_work_that_waits_for_its_source_keeps_no_process() -> None:
    code = (
        "import time; from node.machine.processes import BackgroundThread; thread = BackgroundThread('data'); "
        "assert thread.submit(int, '7').result() == 7; "
        "thread.submit(time.sleep, 3600); thread.shutdown(wait=False)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
