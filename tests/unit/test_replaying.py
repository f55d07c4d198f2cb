"""A run that is over, shown again from what its nodes wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bootstrap.dashboard.measured import measured_in
from bootstrap.dashboard.replaying import SILENT_SECONDS, board_of
from bootstrap.local.summary import Summary
from node.watch.events import JsonLines
from protocol.errors import StateError
from protocol.records.identity import Identity
from protocol.run.manifest import load_preset
from protocol.run.signed_manifest import SignedManifest

TINY = load_preset("tiny")
PEERS = [Identity.from_seed("replay", number).peer_id for number in range(4)]
Event = dict[str, object]
START = 1_700_000_000.0


def life(number: int, stage: int, steps: int, ends: str | None = "left") -> list[Event]:
    """A node that does a step a second and a round every ten."""
    peer, partner = PEERS[number], PEERS[number ^ 1]
    events: list[Event] = [
        {"time": START, "event": "addresses", "addresses": [f"/ip4/10.0.0.1/tcp/1/p2p/{peer}"]},
        {"time": START + 1, "event": "serving", "stage": stage, "step": 0, "round": 0},
    ]
    for step in range(1, steps + 1):
        time = START + 1 + step
        events.append(
            {"time": time, "event": "step", "step": step, "loss": 5.0 - step / 50, "computed": step / 2}
        )
        if step % 10 == 0:
            told = {"partner": partner, "spread": 1e-3, "expected_spread": 2e-3, "gossip_bytes": 100}
            events.append({"time": time, "event": "round", "round": step // 10, "step": step, **told})
    last = START + 1 + steps
    return (
        events
        if ends is None
        else [*events, {"time": last + 0.5, "event": ends, "step": steps, "round": steps // 10}]
    )


def write(directory: Path, events: list[Event], tail: str = "") -> Path:
    directory.mkdir()
    file = directory / "events.jsonl"
    file.write_text("".join(json.dumps(event) + "\n" for event in events) + tail, encoding="utf-8")
    return file


def test_the_board_is_that_of_the_end_with_the_curves_of_the_run(tmp_path: Path) -> None:
    for number, stage in enumerate((0, 0, 1)):
        file = write(tmp_path / f"n{number}", life(number, stage, 100))
    signed = SignedManifest.sign(TINY, Identity.from_seed("owner"))
    file.with_name("manifest.noloco").write_bytes(signed.to_bytes())
    board = board_of([tmp_path])
    assert (board.run["name"], board.run["id"]) == ("tiny", signed.run_id)
    shown = [(row["id"], row["stage"]) for row in board.rows()]
    assert shown == [*((peer, 0) for peer in sorted(PEERS[:2])), (PEERS[2], 1)]
    row = next(row for row in board.rows() if row["id"] == PEERS[0])
    assert (row["step"], row["round"], row["pairs"], row["gossip"]) == (100, 10, 10, 1000)
    assert (row["partner"], row["spread"], row["expected"]) == (PEERS[1], 1e-3, 2e-3)
    assert row["busy"] == pytest.approx(0.5)
    tokens = TINY.inner.microbatches * TINY.tokens_per_microbatch
    assert row["rate"] == pytest.approx(tokens)
    assert board.now.tokens == 2 * 100 * tokens
    assert board.now.loss == pytest.approx(3.0)
    points = board.change_since(0)["points"]
    assert len(points) > 90
    assert points[50].loss == pytest.approx(4.0, abs=0.1)
    past = json.loads(board.picture(START + 31) or "null")
    assert past["rows"][0]["step"] == pytest.approx(30, abs=4)


def test_a_local_swarms_nodes_have_their_names_and_its_losses_are_shown_of_its_own_run_alone(
    tmp_path: Path,
) -> None:
    file = write(tmp_path / "s0r0", life(0, 0, 100))
    signed = SignedManifest.sign(TINY, Identity.from_seed("owner"))
    summary = Summary(run_id=signed.run_id, began=START, validation_loss=[(0, 0.0, 5.5), (900, 60.0, 3.25)])
    summary.bigram_entropy = 2.45
    summary.write(tmp_path / "summary.json")
    board = board_of([tmp_path])  # without the manifest nobody knows whether they are of one run
    assert board.change_since(0)["measured"] is None
    assert board.change_since(0)["left"] is None
    assert [row["name"] for row in board.rows()] == ["s0r0"]
    file.with_name("manifest.noloco").write_bytes(signed.to_bytes())
    assert board_of([tmp_path]).change_since(0)["measured"] == {
        "held_out": True,
        "points": [(START, 0, 5.5), (START + 60, 900, 3.25)],
        "bigram": 2.45,
    }
    assert measured_in(tmp_path / "summary.json", "another") is None


def test_a_node_that_was_killed_falls_silent_where_its_file_ends(tmp_path: Path) -> None:
    write(tmp_path / "a", life(0, 0, 200))
    write(tmp_path / "b", life(1, 1, 50, ends=None), tail='{"time": 17000000')
    board = board_of([tmp_path / "a" / "events.jsonl", tmp_path / "b"])
    silent = next(row["silent"] for row in board.rows() if row["id"] == PEERS[1])
    assert silent == START + 51
    told = next(h for h in board.change_since(0)["happenings"] if h.kind == "silent")
    assert told.time == pytest.approx(START + 51 + SILENT_SECONDS, abs=3)
    assert any(remark.level == "alarm" and "stage 1" in remark.text for remark in board.remarks)


def test_events_that_went_into_a_second_file_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file of three is gone, and who the node is stands in each."""
    events = life(0, 0, 200)
    monkeypatch.setattr("node.watch.events.EVENT_BYTES", len(json.dumps(events)) // 3)
    lines = JsonLines(tmp_path / "events.jsonl")
    for event in events:
        lines(event)
    lines.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["events.1.jsonl", "events.jsonl"]
    board = board_of([tmp_path])
    assert [(row["id"], row["step"]) for row in board.rows()] == [(PEERS[0], 200)]
    assert len(board.change_since(0)["points"]) > 60


def test_a_node_that_left_before_the_end_is_gone(tmp_path: Path) -> None:
    write(tmp_path / "a", life(0, 0, 100))
    write(tmp_path / "b", life(1, 0, 30))
    board = board_of([tmp_path])
    assert [row["id"] for row in board.rows()] == [PEERS[0]]
    assert [h.peer for h in board.change_since(0)["happenings"] if h.kind == "left"] == [PEERS[1]]


@pytest.mark.parametrize(
    "line",
    [
        "[]", "7", '{"event": "step"}', '{"time": "x", "event": "step"}', '{"time": 1e999, "event": "step"}', "\x00",
        '{"time": 1700000050, "event": "step", "step": -3, "loss": "low", "computed": []}',
        '{"time": 1700000050, "event": "round", "partner": "<b>", "spread": 1e400, "round": 1e30}',
        '{"time": 1700000050, "event": "addresses", "addresses": [7]}', '"' + "x" * 200_000,
    ],
)  # fmt: skip
def test_lines_that_no_node_writes_spoil_nothing(tmp_path: Path, line: str) -> None:
    write(tmp_path / "a", life(0, 0, 100), tail=line + "\n")
    board = board_of([tmp_path])
    assert board.rows()[0]["step"] == 100
    json.dumps(board.change_since(0), allow_nan=False)


def test_what_holds_no_events_is_told(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"No events in .*Name a node.s events\.jsonl"):
        board_of([tmp_path])
    with pytest.raises(StateError, match="There is no"):
        board_of([tmp_path / "none"])


@pytest.mark.parametrize(("knows", "of"), [(True, f" of {TINY.inner.total_steps:,}"), (False, "")])
def test_a_run_that_was_stopped_is_not_replayed_as_complete(tmp_path: Path, knows: bool, of: str) -> None:
    for number, stage in enumerate((0, 1)):
        file = write(tmp_path / f"n{number}", life(number, stage, 100, "finished"))
    if knows:
        signed = SignedManifest.sign(TINY, Identity.from_seed("owner"))
        file.with_name("manifest.noloco").write_bytes(signed.to_bytes())
    (finding,) = board_of([tmp_path]).findings
    assert finding.kind == "stopped"
    assert finding.sentence.startswith(f"training has stopped at step 100{of}")
