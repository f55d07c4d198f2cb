"""The files of docker/ are what builders, docker compose and their linters expect."""

from __future__ import annotations

import re
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


def test_the_image_gets_the_requirements_of_the_project() -> None:
    printed = run(sys.executable, DOCKER / "requirements.py", ROOT / "pyproject.toml").stdout.splitlines()
    assert "torch>=2.11,<2.13.1" in printed
    assert not any(line.startswith("pytest") for line in printed)


def test_everything_that_the_dockerfile_copies_passes_dockerignore() -> None:
    copies = re.findall(
        r"^COPY (?!--from)(.*) \S+$", (DOCKER / "Dockerfile").read_text(encoding="utf-8"), re.M
    )
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = " ".join(copies).split()
    assert copied
    for path in copied:
        assert f"!{path}" in allowed
        assert (ROOT / path).exists()
