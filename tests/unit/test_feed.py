"""The feed: microbatches ready before they are asked for, and what was trained on counted step by step."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from node.data.batches import Batch, TokenisingTally, TrainingData
from node.data.documents import Split
from node.data.prefetch import Feed, FeedReport, microbatches_ahead
from node.data.tokenizer import ByteTokenizer, Ids
from node.storage.position import Position
from node.watch.events import Events
from protocol.errors import DataError
from protocol.run.manifest import Manifest
from tests.swarm.micro import MadeUpDocuments, micro_manifest

MANIFEST = micro_manifest()
COUNT = MANIFEST.inner.microbatches


def microbatch(number: int) -> Batch:
    return torch.tensor(number), torch.tensor(number)


@dataclass
class Numbers:
    """Microbatch n holds nothing but n."""

    identity: str = "numbers"
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
            self.made += 1
            tally.documents, tally.nbytes = tally.documents + 1, tally.nbytes + 4
            tally.tokens, tally.seconds = tally.tokens + 1, tally.seconds + 0.001
            yield microbatch(number), Position(self.identity, 0, number + 1)


def feed_of(data: Numbers | TrainingData, position: Position | None = None) -> Feed:
    feed = Feed(cast("TrainingData", data), "run", "peer", MANIFEST, position)
    feed.begin()
    return feed


async def ready(feed: Feed) -> None:
    await asyncio.wait(feed.coming, timeout=30)
    assert all(future.done() for future in feed.coming)


def numbers(batches: list[Batch]) -> list[int]:
    return [int(inputs) for inputs, _ in batches]


async def test_microbatches_are_made_before_they_are_asked_for() -> None:
    data = Numbers()
    feed = feed_of(data)
    await ready(feed)
    assert numbers(await feed.take(COUNT)) == list(range(COUNT))
    await ready(feed)
    assert data.made == microbatches_ahead(MANIFEST) + COUNT  # and no more than that is held
    feed.close()


def test_as_many_as_cover_what_is_tokenised_at_once_but_not_thousands_of_small_ones() -> None:
    sizes = {"data__sequence_tokens": 1_024, "inner__sequences": 8}
    assert microbatches_ahead(micro_manifest(**sizes)) == 32
    assert microbatches_ahead(micro_manifest(**sizes, inner__microbatches=64)) == 128
    assert microbatches_ahead(MANIFEST) == 64


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


@dataclass
class WatchedTokenizer(ByteTokenizer):
    """Notes in which thread it is called, and with how many texts at once."""

    seen: set[tuple[int, int]] = field(default_factory=set)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        self.seen.add((threading.get_ident(), len(texts)))
        return super().encode_batch(texts)


async def test_text_is_tokenised_sixteen_documents_at_once() -> None:
    tokenizer = WatchedTokenizer()
    texts = [f"text {number} " * 20 for number in range(64)]
    feed = feed_of(TrainingData(MadeUpDocuments(texts, Split(0.0)), tokenizer))
    await feed.take(COUNT)
    feed.close()
    assert {size for _, size in tokenizer.seen} == {16}


async def test_how_tokenising_goes_is_told_once_and_noted_every_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    feed, events = feed_of(Numbers()), list[dict[str, Any]]()
    loop = asyncio.get_running_loop()
    report, began = FeedReport(feed, Events(loop.time, events.append)), loop.time()
    caplog.set_level(logging.INFO, "noloco")
    for step in range(200):
        await feed.take(1)
        feed.commit(step)
        report.tell()
        await asyncio.sleep(1.0)
    feed.close()
    assert [round(event["time"] - began) for event in events] == [10, 70, 130, 190]
    assert {event["event"] for event in events} == {"data"}
    pattern = (
        r"Data: tokenising at [\d.]+ MB/s \([\d,]+ tokens/s\); training waited for it [\d.]+% of the time\. "
    )
    assert all(re.fullmatch(pattern + r"Epoch 0, document \d+\.", said) for said in caplog.messages)
    assert len(caplog.messages) == 1, "training did not wait"
