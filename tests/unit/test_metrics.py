"""What Prometheus reads: every query shipped names something that is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from bootstrap.dashboard.board import Board, facts_of
from bootstrap.dashboard.metrics import exposition
from bootstrap.dashboard.wording import Wording
from bootstrap.inspect.observer import Sighting
from node.membership.view import Member
from protocol.announcement import Announcement
from protocol.identity import Identity
from protocol.manifest import load_preset
from protocol.messages.peers import NodeStats

MONITORING = Path(__file__).parents[2] / "docker" / "monitoring"
TINY = load_preset("tiny")


def exposed() -> bytes:
    board = Board(facts_of(TINY, "run"), Wording(TINY.stages))
    for stage in range(TINY.stages):
        stats = NodeStats(
            stage=stage, state="serving", step=7, round=1, loss=2.5, tokens=512, tokens_per_second=100.0, spread=1e-3,
            expected_spread=2e-3, recent_compute_fraction=0.5, gossip_bytes=9, uptime=60.0,
        )  # fmt: skip
        record = Announcement(stage=stage, state="serving", since=0.0)
        board.see(Sighting(Member(Identity.from_seed("metrics", stage).peer_id, record, 1e12), stats), 60.0)
    board.conclude(60.0)
    return exposition(board)[0]


def queries() -> list[str]:
    dashboard = json.loads((MONITORING / "grafana.json").read_text(encoding="utf-8"))
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text(encoding="utf-8"))
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return shown + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def test_every_query_names_real_metrics_and_labels() -> None:
    text = exposed().decode()
    there = set(re.findall(r"^(noloco_\w+)", text, re.MULTILINE))
    labels = set(re.findall(r'[{,](\w+)="', text)) | {"job"}
    asked = queries()
    assert len(asked) > 20
    for query in asked:
        named = set(re.findall(r"\bnoloco_\w+", query))
        assert named or query.startswith("up{")
        assert named <= there, query
        grouped = re.findall(r"by \((\w+)\)", query) + re.findall(r"[{,]\s*(\w+)=", query)
        assert set(grouped) <= labels, query
