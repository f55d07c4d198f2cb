"""Microbatches ahead of training: made in a thread of their own, so that training waits for none.

What was trained on is counted here too, step by step, for the checkpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator

from node.data.batches import Batch, TokenisingTally, TrainingData
from node.machine.processes import BackgroundThread
from node.storage.position import Position
from node.watch.events import Events
from protocol.errors import DataError, later
from protocol.run.manifest import Manifest
from protocol.windows import counted, window

STEPS_AHEAD = 2  # inner steps' worth of microbatches that wait ready, at least
TOKENS_AHEAD = 2**18  # more than are tokenised at once: a device that is quicker than that goes on meanwhile
MOST_AHEAD = 64  # microbatches, for the sake of tokens; small ones are no device's that is so quick
FIRST_TOLD_SECONDS = 10.0
TOLD_SECONDS = 60.0
WORTH_TELLING = 0.03  # of the time: whose training waits for its data longer is told again each minute


class Feed:
    """Prepares microbatches ahead of training in a thread of its own.

    Mutable state: the microbatches being made, where those taken end, and how long training waited.

    A node keeps its feed while it serves other stages. `begin` makes it ready, from where training was.
    """

    def __init__(
        self,
        data: TrainingData,
        run_id: str,
        peer_id: str,
        manifest: Manifest,
        position: Position | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock` tells what tokenising costs; it is read in the thread that does it."""
        self.tally = TokenisingTally(clock)
        self._data = data
        self._seed = (run_id, peer_id)
        self._manifest = manifest
        goes_on = position is not None and self.goes_on_from(position)
        self._trained = position if position is not None and goes_on else Position(data.identity)
        self._before = (0, self._trained)  # a step and where it began; `_trained` is where it ended
        self._batches: Iterator[tuple[Batch, Position]]
        self._coming: deque[asyncio.Future[tuple[Batch, Position]]] = deque()
        self._taken: deque[Position] = deque()  # where the batches end that were taken and not trained on
        self._thread = BackgroundThread("data")
        self._began = 0.0
        self.seconds_waited = 0.0

    @window
    def __repr__(self) -> str:
        ready = sum(future.done() for future in self._coming)
        taken = counted(len(self._taken), "batch", "batches")
        ahead = f"{ready} ready, {len(self._coming) - ready} being made, {taken} taken"
        at = f"epoch {self._trained.epoch}, document {self._trained.document:,}"
        return f"Microbatches: {ahead} | Trained: to {at} | Waited: {self.seconds_waited:.1f} s"

    @property
    def coming(self) -> list[asyncio.Future[tuple[Batch, Position]]]:
        """The microbatches made ahead, or being made, the next one first."""
        return list(self._coming)

    def goes_on_from(self, position: Position) -> bool:
        """Return whether `position` is one in these data."""
        return position.corpus == self._data.identity

    def begin(self) -> None:
        """Make microbatches ready from the first that was not trained on."""
        self.stop()
        self._before = (0, self._trained)
        run_id, peer_id = self._seed
        self._batches = self._data.batches(run_id, peer_id, self._manifest, self._trained, self.tally)
        self._began, self.seconds_waited = asyncio.get_running_loop().time(), 0.0
        self._make_ahead()

    def stop(self) -> None:
        """Make no more. What was taken and not trained on is made again after the next `begin`."""
        for future in self._coming:
            if not future.cancel() and not future.cancelled():
                future.exception()  # nobody will ask for it
        self._coming.clear()
        self._taken.clear()

    def close(self) -> None:
        self.stop()
        self._thread.shutdown(wait=False)

    async def take(self, count: int) -> list[Batch]:
        """The next `count` microbatches. Raises what went wrong with making them, as `DataError`."""
        loop = asyncio.get_running_loop()
        taken: list[Batch] = []
        for _ in range(count):
            self._make_ahead()
            began = loop.time()
            batch, position = await self._coming.popleft()
            self.seconds_waited += loop.time() - began
            taken.append(batch)
        self._make_ahead()
        self._taken.append(position)
        return taken

    async def take_another(self) -> Batch:
        """Take one more for the batch that was taken last, in the place of one that could not be trained on."""
        self._make_ahead()
        batch, position = await self._coming.popleft()
        if self._taken:
            self._taken[-1] = position
        return batch

    def _make_ahead(self) -> None:
        loop = asyncio.get_running_loop()
        while len(self._coming) < microbatches_ahead(self._manifest):
            self._coming.append(loop.run_in_executor(self._thread, _next, self._batches))

    # --- where training is --------------------------------------------------------------------

    def commit(self, step: int) -> None:
        """Note that the oldest batch that was taken goes into the weights, with inner step `step`."""
        self._before, self._trained = (step, self._trained), self._taken.popleft()

    def position(self, step: int | None = None) -> Position:
        """The position of training after `step` inner steps, the last one that was committed or the one before it.

        Without a step, the present one, which a node keeps while it serves another stage.
        """
        last, before = self._before
        return before if step is not None and step < last else self._trained

    # --- what people are told -----------------------------------------------------------------

    def waited(self) -> float:
        """The fraction of the time since `begin` in which training waited for data."""
        seconds = asyncio.get_running_loop().time() - self._began
        return min(1.0, self.seconds_waited / seconds) if seconds > 0 else 0.0


def microbatches_ahead(manifest: Manifest) -> int:
    """Return how many microbatches are made before they are asked for."""
    for_tokens = min(MOST_AHEAD, TOKENS_AHEAD // manifest.tokens_per_microbatch)
    return max(STEPS_AHEAD * manifest.inner.microbatches, for_tokens)


def _next(batches: Iterator[tuple[Batch, Position]]) -> tuple[Batch, Position]:
    """The next of an endless stream: that it ended means that it failed earlier, which was already reported."""
    try:
        return next(batches)
    except StopIteration:
        raise later(DataError("Reading the data broke off. Start the node again.")) from None


class FeedReport:
    """Reports now and then how fast text is tokenised and how long training waited for it.

    People are told once, and again where training waits for it.
    """

    def __init__(self, feed: Feed, events: Events) -> None:
        self._feed = feed
        self._events = events
        self._next = asyncio.get_running_loop().time() + FIRST_TOLD_SECONDS
        self._is_told = False

    def tell(self) -> None:
        """Report when it is time and something was tokenised; called once a step."""
        now, tally = asyncio.get_running_loop().time(), self._feed.tally
        if now < self._next or not tally.tokens:
            return
        self._next = now + TOLD_SECONDS
        (nbytes, tokens), waited = tally.rate(), self._feed.waited()
        position = self._feed.position()
        speed = f"tokenising at {nbytes / 1e6:.1f} MB/s ({tokens:,.0f} tokens/s); " if nbytes else ""
        sentence = (
            f"Data: {speed}training waited for it {waited:.2%} of the time. Epoch {position.epoch}, document "
            f"{position.document:,}."
        )
        facts = {
            "bytes_per_second": round(nbytes),
            "tokens_per_second": round(tokens),
            "waited_fraction": round(waited, 6),
            "documents": tally.documents,
            "epoch": position.epoch,
            "document": position.document,
        }
        if not self._is_told or waited > WORTH_TELLING:
            self._is_told = True
            self._events.say(sentence, "data", **facts)
        else:
            self._events.emit("data", **facts)
