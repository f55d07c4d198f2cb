"""The trace file: loads whole, cut off or full; bounded; and never the reason that training ends."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bootstrap.traces import read_trace
from node.watch import trace as module
from node.watch.trace import NO_TRACE, TraceFile, Track
from protocol.errors import StateError
from protocol.ground import PeerId

Event = dict[str, Any]


def events_of(path: Path, phase: str) -> list[Event]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == phase]


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def as_the_viewers_read(text: str) -> list[Event]:
    """What chrome://tracing does with an array that does not end; Perfetto is more lenient still."""
    text = text.rstrip("\r\n").rstrip().removesuffix(",").rstrip()
    events: list[Event] = json.loads(text if text.endswith("]") else text + "]")
    return events


def test_spans_nest_and_carry_their_arguments(tmp_path: Path) -> None:
    clock = Clock()
    trace = TraceFile(tmp_path / "t.json", clock)
    trace.name_process("stage 3")
    with trace.span(Track.ROUND_END, "outer", partner="x"):
        clock.time += 1
        with trace.span(Track.ROUND_END, "inner"):
            clock.time += 2
        clock.time += 4
    trace.close()
    inner, outer = events_of(tmp_path / "t.json", "X")
    assert (outer["name"], outer["ts"], outer["dur"]) == ("outer", 100_000_000, 7_000_000)
    assert (inner["name"], inner["ts"], inner["dur"]) == ("inner", 101_000_000, 2_000_000)
    assert outer["args"] == {"partner": "x"}
    assert outer["tid"] == inner["tid"]
    names = {(e["name"], e["args"].get("name")) for e in events_of(tmp_path / "t.json", "M")}
    assert ("process_name", "stage 3") in names
    assert ("thread_name", "end of a round") in names


def test_a_span_ends_when_what_it_spans_fails(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "t.json")
    with pytest.raises(ValueError, match="no"), trace.span(Track.ROUNDS, "fails"):
        raise ValueError("no")
    with pytest.raises(ValueError, match="no"), trace.waiting(Track.GATE, "waits", microbatch="7"):
        raise ValueError("no")
    trace.close()
    assert [e["name"] for e in events_of(tmp_path / "t.json", "X")] == ["fails"]
    begun, ended = (events_of(tmp_path / "t.json", phase)[0] for phase in "be")
    assert begun["id"] == ended["id"]
    assert begun["args"] == {"microbatch": "7"}
    assert begun["ts"] <= ended["ts"]


def test_frames_that_move_at_once_get_rows_of_their_own(tmp_path: Path) -> None:
    """In a row, what overlaps without nesting is drawn wrong."""
    clock = Clock()
    trace = TraceFile(tmp_path / "t.json", clock)
    frames = trace.frames()
    for began, ended in [(0, 3), (1, 4), (3, 5), (2, 6), (6, 7)]:
        clock.time = ended
        frames.sent("pipeline", PeerId("12D3KooWabcdefgh"), "forward", 10, began)
    trace.close()
    sent = events_of(tmp_path / "t.json", "X")
    rows: dict[int, list[tuple[int, int]]] = {}
    for event in sent:
        rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        assert all(before[1] <= after[0] for before, after in pairwise(row))
    assert len(rows) == 3
    assert sent[0]["args"] == {"traffic": "pipeline", "peer": "abcdefgh", "bytes": 10}


@pytest.mark.parametrize("threads", [1, 4])
def test_events_of_many_threads_are_all_there(tmp_path: Path, threads: int) -> None:
    trace = TraceFile(tmp_path / "t.json")

    def work(number: int) -> None:
        for index in range(3_000):
            trace.complete(Track.SEND, f"{number}-{index}", index, index + 1)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    trace.close()
    assert len({event["name"] for event in events_of(tmp_path / "t.json", "X")}) == threads * 3_000


def test_a_trace_that_is_cut_off_after_any_flush_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kill -9 leaves it."""
    monkeypatch.setattr(module, "FLUSH_SECONDS", 0.01)
    path, texts = tmp_path / "t.json", []
    trace = TraceFile(path)
    append = trace._append

    def watched(contents: bytes) -> None:
        append(contents)
        texts.append(path.read_text())

    monkeypatch.setattr(trace, "_append", watched)
    texts.append(path.read_text())
    for number in range(1_000):
        trace.complete(Track.COMPUTE, f"job {number}", number, number + 1)
    trace.close()
    assert len(texts) >= 3
    counts = [len(as_the_viewers_read(text)) for text in texts]
    assert counts[0] == 1  # the name of the process
    assert counts == sorted(counts)
    assert json.loads(texts[-1]) == as_the_viewers_read(texts[-1])


def test_a_trace_that_is_cut_off_anywhere_keeps_its_whole_events(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "t.json")
    for number in range(3):
        trace.complete(Track.COMPUTE, "…", number, number + 1)
    trace.close()
    whole = (tmp_path / "t.json").read_bytes()
    everything = json.loads(whole)
    cut = tmp_path / "cut.json"
    for length in range(0, len(whole), 7):
        cut.write_bytes(whole[:length])
        events = list(read_trace(cut))
        assert events == everything[: len(events)]
        assert len(events) >= whole[:length].count(b"\n") - 2


def test_a_disk_that_hangs_costs_events_not_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PENDING", 100)
    monkeypatch.setattr(module, "FLUSH_SECONDS", 60.0)  # the disk hangs
    trace = TraceFile(tmp_path / "t.json")
    for number in range(250):
        trace.complete(Track.COMPUTE, f"job {number}", number, number + 1)
    assert trace.pending <= 102  # with the name of a row
    trace.close()
    kept = len(events_of(tmp_path / "t.json", "X"))
    (told,) = events_of(tmp_path / "t.json", "i")
    assert told["name"] == f"{250 - kept} events lost: the disk was too slow"


def test_a_file_that_gets_too_large_ends_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1_000)
    monkeypatch.setattr(module, "FLUSH_SECONDS", 0.01)
    trace = TraceFile(tmp_path / "t.json")
    for number in range(100):
        trace.complete(Track.COMPUTE, f"job {number}", number, number + 1)
    trace._writer.join(10)
    trace.complete(Track.COMPUTE, "too late", 0, 1)
    trace.close()
    names = [event["name"] for event in events_of(tmp_path / "t.json", "X")]
    assert "too late" not in names
    assert len([record for record in caplog.records if "training goes on" in record.message]) == 1


def test_a_file_that_cannot_be_made_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"nowhere.t\.json \(No such file.*its folder exists") as told:
        TraceFile(tmp_path / "nowhere" / "t.json")
    assert told.value.exit_code == 2
    with pytest.raises(StateError, match=r"Is a directory"):
        TraceFile(tmp_path)


def test_a_full_disk_is_told_at_the_start() -> None:
    with pytest.raises(StateError, match=r"No space left.*Free some space.*--trace"):
        TraceFile(Path("/dev/full"))


def test_a_disk_that_fills_later_ends_the_trace_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FLUSH_SECONDS", 0.01)
    trace = TraceFile(tmp_path / "t.json")
    good, trace._file = trace._file, Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115  the trace closes it
    with caplog.at_level(logging.WARNING):
        trace.complete(Track.COMPUTE, "job", 0, 1)
        trace._writer.join(10)
        for number in range(10):
            trace.complete(Track.COMPUTE, "job", number, number + 1)
        trace.close()
    good.close()
    (warning,) = [record.message for record in caplog.records]
    assert "No space left" in warning
    assert "training goes on" in warning
    assert "ended | Events: 0 pending" in repr(trace)
    assert [e["ph"] for e in as_the_viewers_read((tmp_path / "t.json").read_text())] == ["M"]


def test_half_a_write_is_taken_back(tmp_path: Path) -> None:
    """A disk takes what fits of the last write and then nothing."""
    trace = TraceFile(tmp_path / "t.json")
    trace.close()
    before = (tmp_path / "t.json").read_bytes()

    class Filling:
        def __init__(self) -> None:
            self.file = (tmp_path / "t.json").open("ab", buffering=0)
            self.truncate = self.file.truncate
            self.full = False

        def write(self, contents: bytes) -> int:
            if self.full:
                raise OSError(28, "No space left on device")
            self.full = True
            return self.file.write(contents[:5]) or 0

    filling = Filling()
    trace._file = filling  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space"):
        trace._append(b"0123456789")
    filling.file.close()
    assert (tmp_path / "t.json").read_bytes() == before


@pytest.mark.parametrize(
    "use",
    [
        lambda: NO_TRACE.complete(Track.COMPUTE, "job", 0, 1, more=1),
        lambda: NO_TRACE.span(Track.COMPUTE, "job").__enter__(),
        lambda: NO_TRACE.waiting(Track.COMPUTE, "job").__enter__(),
        lambda: NO_TRACE.async_end(Track.GATE, "wait", NO_TRACE.async_begin(Track.GATE, "wait")),
        NO_TRACE.close,
    ],
)
def test_without_a_trace_nothing_is_remembered_written_or_started(
    use: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    threads = threading.enumerate()
    use()
    assert not vars(NO_TRACE)
    assert not list(tmp_path.iterdir())
    assert threading.enumerate() == threads


@pytest.mark.parametrize("traced", [NO_TRACE.span, NO_TRACE.waiting])
def test_without_a_trace_what_would_be_traced_runs_and_fails_as_ever(
    traced: Callable[..., AbstractContextManager[None]],
) -> None:
    done = False
    with traced(Track.COMPUTE, "job", more=1):
        done = True
    assert done
    with pytest.raises(ValueError, match="the job's own"), traced(Track.COMPUTE, "job"):
        raise ValueError("the job's own")
