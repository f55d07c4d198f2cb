"""What Prometheus reads, by its own tool."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
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


def promtool(*arguments: str | Path, given: bytes = b"") -> str:
    """What it says; fails when it finds something."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("there is no promtool on this machine: apt-get install prometheus")
    done = subprocess.run(
        [found, *map(str, arguments)], input=given, capture_output=True, check=False, timeout=60
    )
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


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


def test_promtool_has_nothing_to_say_of_the_metrics() -> None:
    assert promtool("check", "metrics", given=exposed()) == ""


def test_promtool_has_nothing_to_say_of_alerts_and_settings() -> None:
    assert "SUCCESS" in promtool("check", "rules", "--lint=all", "--lint-fatal", MONITORING / "alerts.yaml")
    promtool("check", "config", "--syntax-only", MONITORING / "prometheus.yaml")


def test_every_query_of_grafana_is_one(tmp_path: Path) -> None:
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries())]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}), encoding="utf-8")
    assert "SUCCESS" in promtool("check", "rules", file)


def test_the_alerts_go_off_when_they_should(tmp_path: Path) -> None:
    series = {
        'noloco_stage_replicas{stage="0"}': "2x20 0x20",
        'noloco_stage_replicas{stage="1"}': "2x20 1x20",
        "noloco_tokens_total": "0+10x20 210x20",
    }
    at = {
        "5m": (),
        "40m": ("NolocoStageEmpty", "NolocoLastReplica", "NolocoStandsStill"),
    }
    names = ("NolocoStageEmpty", "NolocoLastReplica", "NolocoStandsStill")
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)',
                "eval_time": time,
                "exp_samples": [{"value": int(name in firing), "labels": "{}"}],
            }
            for time, firing in at.items()
            for name in names
        ],
    }
    file = tmp_path / "test.yaml"
    tests = {"rule_files": [str(MONITORING / "alerts.yaml")], "evaluation_interval": "1m", "tests": [case]}
    file.write_text(yaml.safe_dump(tests), encoding="utf-8")
    assert "SUCCESS" in promtool("test", "rules", file)
