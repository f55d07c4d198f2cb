"""What Prometheus reads, by its own tool."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.unit.test_metrics import MONITORING, exposed, queries


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


def alerts_are(directory: Path, series: dict[str, str], firing: dict[str, set[str]], names: set[str]) -> None:
    """Check which of the named alerts fire at each time, by series of a point a minute."""
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)',
                "eval_time": time,
                "exp_samples": [{"value": int(name in expected), "labels": "{}"}],
            }
            for time, expected in firing.items()
            for name in sorted(names)
        ],
    }
    file = directory / "test.yaml"
    tests = {"rule_files": [str(MONITORING / "alerts.yaml")], "evaluation_interval": "1m", "tests": [case]}
    file.write_text(yaml.safe_dump(tests), encoding="utf-8")
    assert "SUCCESS" in promtool("test", "rules", file)


def test_the_alerts_go_off_when_they_should(tmp_path: Path) -> None:
    series = {
        'noloco_stage_replicas{stage="0"}': "2x20 0x20",
        'noloco_stage_replicas{stage="1"}': "2x20 1x20",
        "noloco_tokens_total": "0+10x20 210x20",
    }
    names = {"NolocoStageEmpty", "NolocoLastReplica", "NolocoStandsStill"}
    alerts_are(tmp_path, series, {"5m": set(), "40m": names}, names)


@pytest.mark.parametrize("kind", ["complete", "stopped"])
def test_a_run_that_is_over_does_not_stand_still_and_another_beside_it_does(
    tmp_path: Path, kind: str
) -> None:
    over, other = (f'{{job="noloco",instance="{name}"' for name in ("a", "b"))
    series = {
        f"noloco_tokens_total{over}}}": "0+10x20 210x40",
        f'noloco_finding{over},kind="{kind}",stage="",level="fine"}}': "_x20 1x40",
        f'noloco_stage_replicas{over},stage="0"}}': "1x30 0x30",
    }
    names = {"NolocoStandsStill", "NolocoStageEmpty"}
    alerts_are(tmp_path, series, {"25m": set(), "50m": set()}, names)
    series[f"noloco_tokens_total{other}}}"] = "0+10x20 210x40"
    alerts_are(tmp_path, series, {"25m": set(), "50m": {"NolocoStandsStill"}}, names)


def test_setbacks_set_off_alerts(tmp_path: Path) -> None:
    kinds = {
        "loss-jumped": "NolocoLossJumped",
        "begun-anew": "NolocoStageBegunAnew",
        "waiting": "NolocoStageAwaited",
        "step-fell-back": "NolocoStepFellBack",
    }
    for kind, alert in kinds.items():
        series = {f'noloco_finding{{kind="{kind}",stage="0",level="warning"}}': "_x10 1x20"}
        alerts_are(tmp_path, series, {"5m": set(), "20m": {alert}}, set(kinds.values()))
