"""The files of docker/, by the tools that builders and docker compose use."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


DOCKER = ROOT / "docker"


BIN = Path(sys.executable).parent


def tool(name: str) -> str:
    found = shutil.which(name, path=f"{BIN}:/usr/local/bin:/usr/bin")
    if found is None:
        pytest.skip(
            f"no {name} here; it comes with pip install '.[test]' where there is one for the platform"
        )
    return found


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


def test_hadolint_has_nothing_to_say_of_the_dockerfile() -> None:
    linted = run(tool("hadolint"), "--no-color", DOCKER / "Dockerfile")
    assert (linted.returncode, linted.stdout) == (0, ""), linted.stdout


def test_the_compose_files_follow_the_compose_schema() -> None:
    command = (tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec")
    checked = run(*command, DOCKER / "compose.yaml", DOCKER / "compose.cuda.yaml")
    assert checked.returncode == 0, checked.stdout
    wrong = run(*command, DOCKER / "Dockerfile")
    assert wrong.returncode != 0
