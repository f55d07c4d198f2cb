"""What a node trains on when it serves stage 0, kept while it serves others: the data, and where it is in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from node.config import NodeConfig
from node.data.batches import Position, TrainingData
from node.data.opening import DataPlan, open_data
from node.data.prefetch import Feed
from node.machine.processes import in_background
from node.model.state_directory import StateDirectory
from node.watch.events import Events
from protocol.manifest import Manifest

ReadData = Callable[[Manifest, Sequence[str]], TrainingData]


class DataSupply:
    """Mutable state: the data once they were opened, their feed, and the position that the checkpoint had."""

    def __init__(
        self,
        config: NodeConfig,
        manifest: Manifest,
        state: StateDirectory | None,
        events: Events,
        read: ReadData | None = None,
    ) -> None:
        self._manifest = manifest
        self._events = events
        self._read = read
        cache = config.data_cache or (state.path if state is not None else Path()) / "documents"
        self._plan = DataPlan(config.data, config.text_field, cache)
        self._data: TrainingData | None = None
        self._feed: Feed | None = None
        self._saved: Position | None = None

    def require(self) -> None:
        """Raises `DataError` when the run leaves the text to its volunteers and this one named none."""
        if self._read is None:
            self._plan.require(self._manifest)

    async def open(self, tokenizer: bytes | None) -> None:
        """Read the data, the first time, in a thread. Raises `UserError` with what to do."""
        if self._data is None:
            began = time.monotonic()
            self._data = await in_background("data", self._open, tokenizer)
            self._events.emit("data-open", seconds=round(time.monotonic() - began, 3))

    def _open(self, tokenizer: bytes | None) -> TrainingData:
        if self._read is not None:
            return self._read(self._manifest, self._plan.entries)
        data = open_data(self._manifest, self._plan, tokenizer)
        data.require(self._manifest.data.sequence_tokens)
        return data

    def feed(self, run_id: str, peer_id: str) -> Feed:
        """The line of microbatches, from where this node was when it trained last. After `open`."""
        assert self._data is not None
        if self._feed is None:
            self._feed = Feed(self._data, run_id, peer_id, self._manifest, self._saved)
            if self._saved is not None and not self._feed.goes_on_from(self._saved):
                self._events.say(
                    "The data are not those of the checkpoint; beginning with their first epoch.",
                    "data-changed",
                )
        return self._feed

    def return_to(self, position: Position | None) -> None:
        """Where the checkpoint was; before the first feed."""
        self._saved = position

    def position(self, step: int | None = None) -> Position | None:
        """For the checkpoint of the weights after inner step `step`; without one, for that of another stage."""
        return self._saved if self._feed is None else self._feed.position(step)

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()
