"""Nodes of others in a swarm of `noloco swarm`: they are not waited for."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from bootstrap.local.nodes import LocalPlan
from bootstrap.local.swarm import have_finished
from protocol.messages.peers import NodeStats
from protocol.records.announcement import State
from protocol.run.manifest import load_preset


def at(stage: int, state: State = "finished") -> NodeStats:
    return NodeStats(stage=stage, state=state, step=9, round=1, loss=None, tokens_per_second=0.0)


@pytest.mark.parametrize(
    ("own", "guests", "finished"),
    [
        ([at(0), at(1)], [], True),
        ([at(0), at(1, "serving")], [], False),
        ([at(0, "serving"), at(1)], [], False),
        ([at(0), at(1)], [at(1, "serving")], True),
        ([at(0), at(1, "serving")], [at(1, "serving")], False),
        ([at(0), at(1, "serving")], [at(0, "serving")], True),  # the second stage works for the guest
        ([at(0, "serving"), at(1, "serving")], [at(0)], False),
    ],
)
def test_the_end_is_that_of_ones_own_nodes(
    own: list[NodeStats], guests: list[NodeStats], finished: bool
) -> None:
    assert have_finished(own, guests) is finished


def test_the_line_for_one_more_node_names_the_text_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = LocalPlan(
        load_preset("tiny"), 2, tmp_path / "swarm", 1.0, 8, tmp_path / "s.json", None, None,
        data=("books/*.txt", "hub:a/b", "/abs/a file.jsonl"), text_field="body",
    )  # fmt: skip
    address = "/ip4/127.0.0.1/tcp/5/p2p/x"
    assert shlex.split(plan.joining(address)) == [
        "noloco", "join", address, "--data", f"{tmp_path}/books/*.txt", "--data", "hub:a/b",
        "--data", "/abs/a file.jsonl", "--text-field", "body",
    ]  # fmt: skip
    assert replace(plan, data=()).joining(address) == f"noloco join {address}"
