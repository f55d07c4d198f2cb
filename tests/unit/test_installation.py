"""Lines that install: from where this copy came, by the tool that has it, and never by the name alone."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from protocol.files.installation import Installation, _tool, came_from

ROOT = Path(__file__).parents[2]
GIT = {"url": "https://git.example/us/noloco-node", "vcs_info": {"vcs": "git", "commit_id": "a" * 40}}
WHEEL = {"url": "https://files.example/noloco_node-0.2.0-py3-none-any.whl", "archive_info": {}}
# an installer, its options, and the project by its name alone: without "@ place" behind it
BARE = re.compile(
    r"\b(?:pipx?|uv)\b[^`]*\b(?:install|inject|run|add)\b[^`]*[\s'\"]noloco[-_]node(?![\w./-])"
    r"(?!(?:\[[\w,]*\])?\s*@)"
)
FOLDERS = ("protocol", "node", "bootstrap", "docs", "docker", "benchmarks")
SHOWN = (".py", ".md", ".toml", ".service", ".yml", ".yaml", ".sh", ".js", ".html", "Dockerfile", "Makefile")


def folder(tmp_path: Path, *, editable: bool = False, with_git: bool = False) -> Installation:
    (tmp_path / "pyproject.toml").touch()
    if with_git:
        (tmp_path / ".git").mkdir()
    return came_from({"url": tmp_path.as_uri(), "dir_info": {"editable": True} if editable else {}})


def test_a_copy_from_a_folder_is_installed_from_there(tmp_path: Path) -> None:
    where = tmp_path / "of mine"
    where.mkdir()
    quoted = shlex.quote(str(where))
    assert folder(where).with_extra("hf") == f"pip install {shlex.quote(f'{where}[hf]')}"
    assert folder(where, editable=True).with_extra("hf").startswith("pip install -e ")
    assert folder(where).later() == "install the version of today from where this one came"
    assert folder(where, with_git=True).later() == f"git -C {quoted} pull && pip install {quoted}"


def test_a_folder_that_is_gone_is_not_named(tmp_path: Path) -> None:
    gone = came_from({"url": (tmp_path / "gone").as_uri(), "dir_info": {}})
    assert gone.with_extra("hf") == "pip install '.[hf]' in the folder with this project"


def test_a_copy_from_a_repository_is_installed_from_there() -> None:
    assert (
        came_from(GIT).with_extra("hf")
        == "pip install 'noloco-node[hf] @ git+https://git.example/us/noloco-node'"
    )
    assert (
        came_from(GIT).later()
        == "pip install --upgrade 'noloco-node @ git+https://git.example/us/noloco-node'"
    )
    of_tag = {**GIT, "vcs_info": {"vcs": "git", "requested_revision": "v0.2"}}
    assert came_from(of_tag).with_extra("hf").endswith("noloco-node@v0.2'")
    assert "@v0.2" not in came_from(of_tag).later()


def test_a_wheel_is_installed_from_its_address() -> None:
    assert came_from(WHEEL).with_extra("hf") == f"pip install 'noloco-node[hf] @ {WHEEL['url']}'"


@pytest.mark.parametrize(
    ("prefix", "installer", "begins"),
    [
        ("/home/a/.local/pipx/venvs/noloco-node", "pip", "pipx install --force '"),
        ("/home/a/.local/share/uv/tools/noloco-node", "uv", "uv tool install '"),
        ("/home/a/venv", "uv", "uv pip install '"),
        ("/home/a/venv", "pip", "pip install '"),
    ],
)
def test_the_tool_that_has_this_copy_is_named(
    prefix: str, installer: str, begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", prefix)
    found = came_from(GIT, _tool(installer))
    assert found.with_extra("hf").startswith(begins)
    assert found.later().startswith(begins.removesuffix("'"))


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"url": "ftp://files.example/a.whl", "archive_info": {}},
        {"url": "http://files.example/a.whl", "archive_info": {}},
        {"url": "https://files.example/a\u202e.whl", "archive_info": {}},
        {"url": "https://files.example/" + 400 * "a", "archive_info": {}},
        {"url": "https://files.example/a;curl x|sh`y`$(z).whl", "archive_info": {}},
        {"url": "https://me:secret@git.example/us/it", "vcs_info": {"vcs": "git", "commit_id": "a"}},
    ],
)
def test_what_cannot_be_trusted_stays_out_of_a_line_that_people_copy(told: dict[str, object]) -> None:
    for line in (came_from(told).with_extra("hf"), came_from(told).later()):
        assert "secret" not in line
        assert "http:" not in line
        assert "ftp" not in line
        assert len(line) < 400
        assert "\u202e" not in line
        if "curl" in line:
            assert shlex.split(line)[-1].startswith("noloco-node"), "one word of the shell"


def test_nothing_that_people_read_installs_the_project_by_its_name_alone() -> None:
    """It is registered nowhere: whoever registers it would own the machines of those who type that."""
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*"))] + list(ROOT.glob("*"))
    read = [file for file in files if file.is_file() and file.name.endswith(SHOWN)]
    assert len(read) > 500
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in read
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if BARE.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("line", "is_bare"),
    [
        ("pip install 'noloco-node[hf]'", True),
        ("pip install --upgrade noloco-node", True),
        ("pipx install --global noloco-node   # or", True),
        ("uv tool install noloco_node", True),
        ("uv pip install noloco-node==0.2", True),
        ("pip install 'noloco-node[hf] @ git+https://git.example/us/it'", False),
        ("pip install '/home/a/noloco-node[hf]'", False),
        ("pip install .", False),
    ],
)
def test_a_bare_name_is_found(line: str, is_bare: bool) -> None:
    assert bool(BARE.search(line)) is is_bare
