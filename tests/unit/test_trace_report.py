"""Each instant of a trace is counted once, under what it was spent on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bootstrap.tools_cli import app
from bootstrap.traces import time_of_nodes
from node.watch.spans import common, length, merged, without
from node.watch.time_use import Idle
from node.watch.trace import TraceFile, Track
from protocol.errors import StateError

SPANS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda s: (min(s), max(s))), max_size=12
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def trace_of(path: Path, process: int, spans: dict[Track, list[tuple[str, float, float]]]) -> Path:
    """A real trace file, with the number of another process."""
    clock = Clock()
    trace = TraceFile(path, clock)
    trace.name_process(f"stage {process}")
    halves = []
    for track, events in spans.items():
        for name, began, ended in events:
            if track is Track.GRADIENT:
                halves.append((name, began, ended))
            else:
                trace.complete(track, name, began, ended)
    for name, began, ended in halves:
        clock.now = began
        number = trace.async_begin(Track.GRADIENT, name)
        clock.now = ended
        trace.async_end(Track.GRADIENT, name, number)
    trace.close()
    events = json.loads(path.read_text())
    path.write_text("[\n" + ",\n".join(json.dumps(event | {"pid": process}) for event in events) + "\n]\n")
    return path


@pytest.fixture
def two_stages(tmp_path: Path) -> list[Path]:
    """Ten seconds of two stages: the first waits one on the way, one for bytes, two for the other stage."""
    first = {
        Track.COMPUTE: [("forward", 0.0, 2.0), ("backward", 6.0, 9.0), ("inner step", 9.0, 10.0)],
        Track.GRADIENT: [("wait for a gradient", 2.0, 6.0)],
        Track.SEND: [("pipeline: forward", 2.0, 3.0)],
    }
    second = {
        Track.COMPUTE: [("last stage", 3.0, 5.0), ("outer step", 8.0, 10.0)],
        Track.ROUND_END: [("end of the round", 7.0, 10.0)],
    }
    return [trace_of(tmp_path / "a.json", 7, first), trace_of(tmp_path / "b.json", 8, second)]


def test_every_instant_is_counted_once_under_its_cause(two_stages: list[Path]) -> None:
    first, second = time_of_nodes(two_stages)
    assert (first.name, first.seconds) == ("stage 7", 10.0)
    assert first.jobs == pytest.approx({"backward": 0.3, "forward": 0.2, "inner step": 0.1})
    assert list(first.jobs) == ["backward", "forward", "inner step"]
    assert first.idle == pytest.approx(
        {Idle.ROUND_END: 0, Idle.MOVING: 0.1, Idle.OTHERS: 0.2, Idle.ON_THE_WAY: 0.1, Idle.NOTHING: 0}
    )
    assert second.seconds == 7.0  # from its own first work
    assert second.idle[Idle.ROUND_END] == pytest.approx(1 / 7)
    assert second.idle[Idle.OTHERS] == pytest.approx(1 / 7)
    for node in (first, second):
        assert node.computing + sum(node.idle.values()) == pytest.approx(1.0)


def test_the_beginning_can_be_left_out(two_stages: list[Path]) -> None:
    first, _ = time_of_nodes(two_stages, skip=6.0)
    assert (first.seconds, first.computing) == (4.0, 1.0)


@given(SPANS, SPANS)
def test_sets_of_instants_agree_with_counting_them(
    a: list[tuple[int, int]], b: list[tuple[int, int]]
) -> None:
    def instants(spans: list[tuple[int, int]]) -> set[int]:
        return {instant for began, ended in spans for instant in range(began, ended)}

    assert length(merged(a)) == len(instants(a))
    assert length(common(merged(a), merged(b))) == len(instants(a) & instants(b))
    whole = np.array([[0.0, 60.0]])
    assert length(common(without(merged(a)), whole)) == 60 - len(instants(a))


@pytest.mark.parametrize("content", ["", "[]", "hello", '[\n{"ph": "X"}\n]\n', "\x00\x01"])
def test_what_is_no_trace_is_told_by_its_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "no.json"
    path.write_text(content)
    with pytest.raises(StateError, match=r"no\.json"):
        time_of_nodes([path])
    result = CliRunner().invoke(app, ["trace", str(path)])
    assert result.exit_code == 2
    assert "no.json" in result.output
    assert "Traceback" not in result.output


def test_the_table_has_a_column_for_each_node(two_stages: list[Path]) -> None:
    result = CliRunner().invoke(app, ["trace", *map(str, two_stages)])
    assert result.exit_code == 0, result.output
    assert "stage 7" in result.output
    assert any("others compute" in line and "20" in line for line in result.output.splitlines())
