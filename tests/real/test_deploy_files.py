"""The files of docker/deploy/ are what systemd, Kubernetes and Slurm expect."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from node.config import NodeConfig
from node.machine.environment import ENVIRONMENT_PREFIX
from tests.real.test_container_linters import run, tool

DEPLOY = Path(__file__).parent.parent.parent / "docker" / "deploy"


def test_kubernetes_takes_the_manifest(tmp_path: Path) -> None:
    validate, file = tool("kubernetes-validate"), DEPLOY / "kubernetes.yaml"
    checked = run(validate, "--strict", file)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(file.read_text(encoding="utf-8").replace("hostPort: 31337", "hostPort: high"))
    assert run(validate, "--strict", wrong).returncode != 0


def test_the_pods_settings_are_settings_of_a_node() -> None:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    [pods] = [
        document["spec"]["template"]["spec"] for document in documents if document["kind"] == "StatefulSet"
    ]
    [container] = pods["containers"]
    names = {entry["name"] for entry in container["env"] if entry["name"].startswith(ENVIRONMENT_PREFIX)}
    assert {name.removeprefix(ENVIRONMENT_PREFIX).lower() for name in names} <= set(NodeConfig.model_fields)
    claims = {volume["name"] for volume in pods["volumes"]} | {"state"}
    assert {mount["name"] for mount in container["volumeMounts"]} <= claims


@pytest.mark.parametrize("name", ["node", "seed", "page"])
def test_systemd_takes_the_units(name: str, tmp_path: Path) -> None:
    text = (DEPLOY / f"noloco-{name}.service").read_text(encoding="utf-8")
    unit = tmp_path / f"noloco-{name}.service"
    text = re.sub(
        r"ExecStart=/usr/local/bin/[a-z-]+", f"ExecStart={sys.executable}", text
    )  # which must be there
    unit.write_text(text)
    checked = run(tool("systemd-analyze"), "verify", unit)
    if "No such file or directory" in checked.stderr or "Failed to" in checked.stderr.split(":")[0]:
        pytest.skip(f"systemd-analyze does not work here: {checked.stderr[:100]}")
    assert unit.name not in checked.stderr, checked.stderr
    named = re.findall(rf"{ENVIRONMENT_PREFIX}([A-Z_]+)=", text)
    assert {name.lower() for name in named} <= set(NodeConfig.model_fields)
    unit.write_text(text.replace("KillSignal=SIGINT", "KillSignal=SIGNONE"))
    assert unit.name in run(tool("systemd-analyze"), "verify", unit).stderr


def test_the_batch_script_is_one_and_asks_for_the_run() -> None:
    script = DEPLOY / "noloco.sbatch"
    assert run("bash", "-n", script).returncode == 0
    text = script.read_text(encoding="utf-8")
    assert text.startswith("#!/bin/bash\n")
    orders = [line for line in text.split("set -euo")[0].splitlines() if line.startswith("#SBATCH")]
    assert len(orders) > 5
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line) for line in orders)
    outside = {"PATH": "/bin:/usr/bin"}
    without = subprocess.run(["bash", script], capture_output=True, text=True, check=False, env=outside)
    assert without.returncode != 0
    assert "export NOLOCO_JOIN=" in without.stderr
    [command] = re.findall(r"exec noloco-node (.*)", text)
    flags = {flag.removeprefix("--").replace("-", "_") for flag in re.findall(r"--[a-z-]+", command)}
    assert flags == {"device", "state_dir", "port"}
    assert flags <= set(NodeConfig.model_fields)
