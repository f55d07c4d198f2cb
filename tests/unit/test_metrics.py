"""What Prometheus reads: every query shipped names something that is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from bootstrap.dashboard.board import Board, facts_of
from bootstrap.dashboard.metrics import exposition
from bootstrap.dashboard.wording import Wording
from bootstrap.inspect.observer import Sighting
from node.membership.view import Member
from protocol.messages.peers import LossBest, NodeStats
from protocol.records.announcement import Announcement
from protocol.records.identity import Identity
from protocol.run.manifest import load_preset

MONITORING = Path(__file__).parents[2] / "docker" / "monitoring"
TINY = load_preset("tiny")


def exposed(state: str = "serving", step: int = 7) -> bytes:
    board = Board(facts_of(TINY, "run"), Wording(TINY.stages, total_steps=TINY.inner.total_steps))
    for stage in range(TINY.stages):
        stats = NodeStats(
            stage=stage, state=state, step=step, round=1, loss=2.5, tokens=512, tokens_per_second=100.0, spread=1e-3,
            best=LossBest(2.4, 30.0),
            expected_spread=2e-3, recent_compute_fraction=0.5, gossip_bytes=9, uptime=60.0, passed_on=12,
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


@pytest.mark.parametrize("alert", ["NolocoStandsStill", "NolocoStageEmpty"])
@pytest.mark.parametrize(("kind", "step"), [("complete", TINY.inner.total_steps), ("stopped", 7)])
def test_a_run_that_is_over_sets_off_no_alert_that_nobody_trains(alert: str, kind: str, step: int) -> None:
    """Its own finding holds the alert back: of this dashboard, whatever other runs the same Prometheus reads."""
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text(encoding="utf-8"))
    (expr,) = [rule["expr"] for group in rules["groups"] for rule in group["rules"] if rule["alert"] == alert]
    held_back = 'unless on (job, instance) noloco_finding{kind=~"complete|stopped"}'
    assert expr.endswith(held_back)
    shown = f'noloco_finding{{kind="{kind}",level="fine",stage=""}} 1.0'
    assert shown in exposed("finished", step).decode()
    assert shown not in exposed().decode()


def test_the_best_loss_is_a_metric_with_its_time() -> None:
    text = exposed().decode()
    assert "noloco_loss_best_nats 2.4" in text
    assert "noloco_loss_best_timestamp_seconds 30.0" in text


def test_each_setback_has_an_alert() -> None:
    asked = " ".join(queries())
    for kind in ("loss-jumped", "begun-anew", "waiting", "step-fell-back"):
        assert f'noloco_finding{{kind="{kind}"' in asked


def test_what_a_member_passes_on_between_others_is_counted() -> None:
    peer = Identity.from_seed("metrics", 0).peer_id
    assert f'noloco_member_passed_on_bytes_total{{peer="{peer}",stage="0"}} 12.0' in exposed().decode()
