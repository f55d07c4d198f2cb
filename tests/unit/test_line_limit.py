"""What is logged in a minute: everything of a node that trains, little of what is done to it again and again."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Iterator

import pytest

from bootstrap.lab.in_memory.virtual_time import run_virtual
from node.watch.line_limit import MINUTE, MOST, MOST_ALIKE, MOST_KINDS, MOST_TOLD, LineLimit


class Log(logging.Handler):
    """What a handler with a `LineLimit` shows. Mutable state: the time, in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.lines: list[str] = []
        self.limit = LineLimit(self, lambda: self.now)
        self.addFilter(self.limit)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def say(self, message: str, *parts: object, level: int = logging.INFO, name: str = "node") -> None:
        self.handle(logging.LogRecord(name, level, "", 0, message, parts, None))


@pytest.fixture
def log() -> Log:
    return Log()


def test_what_a_node_says_in_a_minute_is_shown(log: Log) -> None:
    for minute in range(10):
        for number in range(MOST_ALIKE):
            log.now = minute * MINUTE + number
            log.say("Round %d ends", number)
            log.say(f"Sentence {number} of another kind", level=logging.WARNING)
    assert len(log.lines) == 10 * 2 * MOST_ALIKE


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING, logging.ERROR])
def test_lines_of_one_kind_are_twenty_and_one_tells_of_the_others(log: Log, level: int) -> None:
    for number in range(1_000):
        log.say("Peer %s is ignored", number, level=level)
    assert len(log.lines) == MOST_ALIKE
    log.say("Something else")
    assert log.lines[MOST_ALIKE:] == ["Something else"]
    log.now = MINUTE
    log.say("Peer %s is ignored", "next")
    assert log.lines[MOST_ALIKE + 1 :] == [
        "… and 980 more like it: Peer 20 is ignored",
        "Peer next is ignored",
    ]


def test_the_same_message_of_another_part_is_another_kind(log: Log) -> None:
    for _ in range(50):
        log.say("It failed", name="node.rounds")
    log.say("It failed", name="node.pipeline")
    assert len(log.lines) == MOST_ALIKE + 1


def test_lines_of_all_kinds_are_a_hundred_and_errors_come_through(log: Log) -> None:
    for number in range(1_000):
        log.say(f"Peer {number} is ignored", level=logging.WARNING)
    assert len(log.lines) == MOST
    log.say("A part of this node failed", level=logging.ERROR)
    assert log.lines[MOST:] == ["A part of this node failed"]
    log.now = MINUTE
    log.say("next")
    told = log.lines[MOST + 1 : -1]
    assert len(told) == MOST_TOLD + 1
    assert told[-1] == f"… and {1_000 - MOST - (1_000 - MOST_KINDS) - (MOST_TOLD - 1)} more of other kinds"
    assert told[0].startswith(f"… and {1_000 - MOST_KINDS} more like it: Peer {MOST_KINDS} ")


def test_what_is_remembered_is_bounded(log: Log) -> None:
    for number in range(10 * MOST_KINDS):
        log.say(f"{number} " + "x" * 10_000, level=logging.ERROR)
    assert len(log.limit.kinds) == MOST_KINDS + 1
    assert all(len(text) <= 200 for kind in log.limit.kinds for text in kind)
    assert len(log.lines) == MOST_KINDS + MOST_ALIKE


def test_a_developer_who_asks_for_everything_gets_it(log: Log) -> None:
    for number in range(1_000):
        log.say("p2pd: %s", number, level=logging.DEBUG)
    assert len(log.lines) == 1_000


def test_lines_whose_parts_do_not_fit_are_left_out_as_others(log: Log) -> None:
    for _ in range(MOST_ALIKE + 2):
        log.handle(logging.LogRecord("node", logging.INFO, "", 0, "no parts", None, None))
    for _ in range(MOST_ALIKE + 2):
        log.limit.filter(logging.LogRecord("node", logging.INFO, "", 0, "%d parts", ("no number",), None))
    log.now = MINUTE
    log.say("next")
    assert "… and 2 more like it: %d parts" in log.lines


@pytest.fixture
def asyncio_logs_to(log: Log) -> Iterator[None]:
    logger = logging.getLogger("asyncio")
    logger.addHandler(log)
    yield
    logger.removeHandler(log)


@pytest.mark.usefixtures("asyncio_logs_to")
def test_exceptions_that_nobody_retrieved_are_of_one_kind(log: Log) -> None:
    async def fail(number: int) -> None:
        raise KeyError(number)

    async def main() -> None:
        for number in range(100):
            task = asyncio.create_task(fail(number), name=f"task {number}")
            await asyncio.wait([task])
            del task
        gc.collect()

    run_virtual(main())
    assert len(log.lines) == MOST_ALIKE
    assert all("never retrieved" in line for line in log.lines)
