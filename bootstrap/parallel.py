"""The same work on many items, several at a time in processes of their own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def as_they_end(work: Callable[[Item], Result], items: Sequence[Item], jobs: int) -> Iterator[Result]:
    """What `work` makes of each item, in the order in which they end; `jobs` processes at a time.

    With one job all is done in this process, in the order of the items. `work`, items and results are pickled
    otherwise. An error of `work` comes out here. Nothing further begins after that or when the iterator is
    closed, and that waits for what is under way.
    """
    if jobs == 1 or len(items) < 2:
        yield from map(work, items)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(items)), mp_context=spawn) as pool:
        running = [pool.submit(work, item) for item in items]
        try:
            for future in as_completed(running):
                yield future.result()
        finally:
            for future in running:
                future.cancel()
