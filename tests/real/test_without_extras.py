"""A volunteer's node needs none of the packages that only data sets, plans and pictures take."""

from __future__ import annotations

import subprocess
import sys

import pytest

from protocol.files.installation import extra_line

OPTIONAL = (
    "networkx",
    "matplotlib",
    "datasets",
    "pyarrow",
    "starlette",
    "uvicorn",
    "prometheus_client",
    "tensorboard",
)


# scipy is not among them: hivemind imports it
BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""


def run_without(packages: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    return run_code(BLOCKED.format(blocked=set(packages)) + code)


def run_code(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_the_daemon_and_the_local_swarm_start_without_them() -> None:
    code = "import node.process.daemon, node.process.serving, bootstrap.local.swarm, bootstrap.inspect.table"
    done = run_without(OPTIONAL, code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("package", "extra", "code"),
    [
        (
            "matplotlib",
            "plot",
            "from pathlib import Path; from bootstrap.display import figure; "
            "figure(Path('plan.svg')).__enter__()",
        ),
        ("scipy", "lab", "import bootstrap.lab.placement.noloco"),
        ("networkx", "lab", "import bootstrap.lab.placement.pairing"),
        (
            "pyarrow",
            "data",
            "from pathlib import Path; from node.data.rows import parquet_texts; "
            "list(parquet_texts(Path('none.parquet'), 'text'))",
        ),
        *(
            (
                package,
                "dashboard",
                "from node.dashboard_process import dashboard_beside; "
                "import asyncio; asyncio.run(dashboard_beside('127.0.0.1:0', list).__aenter__())",
            )
            for package in ("starlette", "uvicorn", "prometheus_client")
        ),
        (
            "tensorboard",
            "tensorboard",
            "from pathlib import Path; from bootstrap.dashboard.watching import to_tensorboard; "
            "to_tensorboard(Path('curves')).__enter__()",
        ),
        (
            "wandb",
            "wandb",
            "from bootstrap.dashboard.watching import to_wandb; to_wandb('project').__enter__()",
        ),
        (
            "datasets",
            "data",
            "from node.data.hub import HubStream; HubStream('some/name', 'text')",
        ),
    ],
)
def test_what_needs_one_says_what_to_install(package: str, extra: str, code: str) -> None:
    done = run_without((package,), code)
    assert done.returncode
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith(f"needs the package {package}, which is not installed: {extra_line(extra)}.")


def test_without_its_lab_a_copy_says_so_and_has_all_other_commands() -> None:
    of_lab = BLOCKED.replace('name.split(".")[0]', "name").replace("in {blocked!r}", "== 'bootstrap.lab'")
    command = "import sys; from bootstrap.tools_cli import app; app(sys.argv[1:] + {given!r})"

    def typed(*given: str) -> subprocess.CompletedProcess[str]:
        return run_code(of_lab.format() + command.format(given=list(given)))

    assert typed("help").returncode == 0
    for given in (("plan", "--scenario", "links.json"), ("simulate", "attacks", "--replicas", "10")):
        done = typed(*given)
        assert done.returncode == 2, done.stderr
        assert "has no lab" in done.stderr
        assert "Traceback" not in done.stderr
