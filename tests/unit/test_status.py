"""What `noloco status` prints: words first, then stages, then nodes; no speed where nothing is trained."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from bootstrap.inspect.observer import Sighting
from bootstrap.inspect.seen import Seen
from bootstrap.inspect.status import RunStatus, as_json, print_status, shown
from protocol.records.identity import Identity
from protocol.run.manifest import load_preset
from tests.unit.test_verdict import FALLS, node, pairs, silent

MANIFEST = load_preset("tiny")


def status(sightings: list[Sighting]) -> RunStatus:
    return RunStatus(
        "0123abcd",
        MANIFEST,
        Seen(MANIFEST.stages, sightings, version="0.1.0", total_steps=MANIFEST.inner.total_steps),
    )


def text_of(sightings: list[Sighting], width: int = 110) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(shown(status(sightings), width))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_words_come_first_then_stages_then_nodes() -> None:
    rate = float(MANIFEST.inner.microbatches * MANIFEST.tokens_per_microbatch)  # a step a second
    lines = text_of(pairs(2, trend=FALLS, step=1_000, tokens_per_second=rate, loss=2.28, spread=1e-3))
    left = f"about {(MANIFEST.inner.total_steps - 1_000) / 3600:.1f} h left"
    assert lines[:3] == [
        "healthy  run 'tiny'  0123abcd  version 0.1.0",
        f"step 1,000 of {MANIFEST.inner.total_steps:,}, {left}",
        "   learning: 2.31 → 2.28 in the last hour.",
    ]
    headings = [line.strip() for line in lines]
    assert headings.index("stages") < headings.index("nodes")
    (stage,) = [line.split() for line in lines if line.strip().startswith("1 ") and "2.280" in line]
    assert stage[:6] == ["1", "2", "0", "1,000", "1", "2.280"]


@pytest.mark.parametrize(
    ("sightings", "word", "row"),
    [
        (pairs(2), "healthy", "0:●●   1:●●"),
        ([*pairs(1), node(1)], "degraded", "0:●●   1:●"),
        ([*pairs(1), node(1, state="joining"), silent(1)], "standing still", "0:●●   1:✗◐○"),
        (pairs(1), "standing still", "0:●●   1:✗"),
        (pairs(2, state="finished", step=MANIFEST.inner.total_steps), "finished", "0:●●   1:●●"),
        (pairs(2, state="finished"), "stopped", "0:●●   1:●●"),
        ([node(n % 2, n) for n in range(31)], "healthy", "0:●●●●●●●●●●●●+4   1:●●●●●●●●●●●●+3"),
    ],
)
def test_one_word_comes_first_and_a_hole_is_seen_at_once(
    sightings: list[Sighting], word: str, row: str
) -> None:
    lines = text_of(sightings)
    assert lines[0].startswith(f"{word}  run 'tiny'")
    assert row in map(str.strip, lines)
    assert as_json(status(sightings))["state"] == word


def test_where_a_stage_has_nobody_training_stands_still_and_no_tokens_flow() -> None:
    sightings = [node(0, n, no_peer_seconds=32.0, tokens_per_second=7_201.0) for n in range(2)]
    lines = text_of(sightings)
    assert lines[2] == "!! stage 1: nobody for 32 s, training stands still."
    assert sum("stands still" in line for line in lines[3:]) == 2  # both stages
    assert "0/s" in lines[-1]
    assert as_json(status(sightings))["tokens_per_second"] == 0.0
    assert status(sightings).progress.seconds_left is None


def test_nothing_folds_at_eighty_columns() -> None:
    full = {"loss": 2.28, "spread": 1.23e-3, "expected_spread": 1.1e-3, "recent_compute_fraction": 0.87}
    sightings = pairs(2, step=12_345, round=1_234, seconds_per_microbatch=0.123, **full)
    for line in text_of(sightings, width=80):
        assert len(line) <= 80
    assert len([line for line in text_of(sightings, 80) if "serving" in line]) == 4
    assert not [line for line in text_of(sightings, 80) if "…" in line]


def test_as_json_has_the_verdict_and_every_node() -> None:
    said = json.loads(json.dumps(as_json(status([*pairs(1), node(1)]))))
    assert said["run"] == {"name": "tiny", "id": "0123abcd", "stages": 2}
    assert said["verdict"][0] == {
        "severity": "warning", "kind": "one-replica", "stage": 1, "time": None,
        "sentence": "stage 1 has only one replica",
    }  # fmt: skip
    assert [entry["stage"] for entry in said["nodes"]] == [0, 0, 1]
    assert said["nodes"][0]["version"] == "0.1.0"
    assert said["total_steps"] == MANIFEST.inner.total_steps


@pytest.mark.parametrize("state", ["finished", "serving"])
def test_a_complete_run_has_no_time_left(state: str) -> None:
    progress = status(pairs(2, state=state, step=MANIFEST.inner.total_steps)).progress
    assert progress.step == MANIFEST.inner.total_steps
    assert progress.seconds_left == (None if state == "finished" else 0.0)


def test_the_address_of_a_member_that_nobody_can_dial_is_that_of_a_peer_that_passes_streams_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    open_, hidden, through_seed = node(0, 0), node(0, 1), node(1, 0)
    seed = Identity.from_seed("seed").peer_id
    at = f"/ip4/8.8.8.8/tcp/4001/p2p/{open_.member.peer}"

    def told(sighting: Sighting, name: str, address: str, *through: str) -> Sighting:
        changed = {"addresses": [address], "through": list(through), "name": name}
        record = sighting.member.announcement.model_copy(update=changed)
        return replace(sighting, member=replace(sighting.member, announcement=record))

    home = "/ip4/192.168.1.2/tcp/4001/p2p/12D3KooWHOME"
    sightings = [
        told(open_, "open", at),
        told(hidden, "hidden", home, seed, open_.member.peer),
        told(through_seed, "far", home, seed),
    ]
    seen = replace(status(sightings), dialled={})
    print_status(seen)
    lines = capsys.readouterr().out.splitlines()
    assert f"open  {at}" in lines
    assert f"hidden  {at}  (of open, which passes streams on to it)" in lines
    assert not any("192.168" in line for line in lines)
    by_seed = f"/ip4/9.9.9.9/tcp/4001/p2p/{seed}"
    seen = replace(seen, dialled={seed: by_seed})
    print_status(seen)
    lines = capsys.readouterr().out.splitlines()
    assert f"far  {by_seed}  (of …{seed[-8:]}, which passes streams on to it)" in lines
    entries = as_json(seen)["nodes"]
    assert isinstance(entries, list)
    assert [entry["join"] for entry in entries] == [at, by_seed, by_seed]
    assert [entry["through"] for entry in entries] == [[], [seed, open_.member.peer], [seed]]


def test_a_hidden_member_that_nobody_passes_streams_on_to_cannot_be_joined_at(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its record names itself."""
    alone = node(0, 0)
    me = alone.member.peer
    said = {"addresses": [f"/ip4/192.168.1.2/tcp/4001/p2p/{me}"], "through": [me]}
    record = alone.member.announcement.model_copy(update=said)
    sighting = replace(alone, member=replace(alone.member, announcement=record))
    seen = replace(status([sighting]), dialled={})
    print_status(seen)
    assert "192.168" not in capsys.readouterr().out
    entries = as_json(seen)["nodes"]
    assert isinstance(entries, list)
    assert entries[0]["join"] == ""
    at = f"/ip4/192.168.1.2/tcp/4001/p2p/{me}"
    print_status(replace(seen, dialled={me: at}))  # by an observer in the same home
    out = capsys.readouterr().out
    assert at in out
    assert "passes streams on" not in out


def test_what_nodes_pass_on_between_others_has_a_line_of_its_own() -> None:
    assert not any("passed on" in line for line in text_of(pairs(2)))
    lines = text_of([node(0, 0, passed_on=3 << 20), node(0, 1), *(node(1, n, passed_on=n) for n in range(9))])
    (line,) = [line for line in lines if "passed on" in line]
    assert line.startswith(f"passed on for others: {node(0, 0).member.peer[-8:]} 3.0 MiB, ")
    entries = as_json(status([node(0, 0, passed_on=5)]))["nodes"]
    assert isinstance(entries, list)
    assert entries[0]["passed_on"] == 5
