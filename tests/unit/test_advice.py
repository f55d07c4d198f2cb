"""What people are told to type exists: every option that a message or a page names is one of that command."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from bootstrap.found_cli import app as founding
from bootstrap.tools_cli import app as tools
from node.cli import app as daemon

ROOT = Path(__file__).parents[2]
SOURCES = [
    path for folder in ("protocol", "node", "bootstrap") for path in sorted((ROOT / folder).rglob("*.py"))
]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
PROGRAMS = {"noloco": tools, "noloco-node": daemon, "noloco-bootstrap": founding}
OF_OTHERS = {
    "--ulimit",  # docker
    "--upgrade",  # pip
    "--de-quantize", "--local-dir", "--safe",  # of mlx_lm, hf download, DeepSpeed (--safe_serialization)
    "--query-gpu", "--format",  # nvidia-smi
    "--property", "--no-legend", "--no-pager",  # systemd's, of a session that somebody works in
    "--shutdown",  # wsl
    "--to",  # jupyter nbconvert
    "--no",  # the beginning of --no-…
}  # fmt: skip


def options_of(command: Any) -> set[str]:
    given = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    return {"--help", "--help-all", *given}  # the latter where there are rare options


def commands() -> dict[tuple[str, ...], set[str]]:
    """Options by the words that call a command."""
    found: dict[tuple[str, ...], set[str]] = {}

    def collect(words: tuple[str, ...], command: Any) -> None:
        found[words] = options_of(command)
        for name, inner in getattr(command, "commands", {}).items():
            collect((*words, name), inner)

    for name, app in PROGRAMS.items():
        collect((name,), get_command(app))
    return found


COMMANDS = commands()
EVERY_OPTION = set().union(*COMMANDS.values())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_option_in_a_message_is_one_of_ours(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    named = {flag for text in texts for flag in FLAG.findall(text)}
    assert named <= EVERY_OPTION | OF_OTHERS


def lines_of(page: Path) -> Iterator[str]:
    """What stands in code: inline or indented, in one piece where a line ends with a backslash."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        yield from [line.strip()] if line.startswith("    ") else re.findall(r"`([^`]+)`", line)


def called(line: str) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """(words of the command, its options) of each of our commands in a line of a shell."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        words = line.split()
    for place, word in enumerate(words):
        is_value = place > 0 and words[place - 1].startswith("--")
        if (name := word.rpartition("/")[2]) in PROGRAMS and not is_value:
            command, rest = (name,), words[place + 1 :]
            while rest and (*command, rest[0]) in COMMANDS:
                command, rest = (*command, rest[0]), rest[1:]
            ends = next((i for i, word in enumerate(rest) if word in ("|", "&&", ";", "&", ">")), len(rest))
            yield command, [flag for word in rest[:ends] for flag in FLAG.findall(word.partition("=")[0])]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_command_on_a_page_has_the_options_it_is_shown_with(page: Path) -> None:
    wrong = [
        (" ".join(command), flag)
        for line in lines_of(page)
        for command, flags in called(line)
        for flag in flags
        if flag not in COMMANDS[command]
    ]
    assert not wrong


def test_the_pages_do_show_commands() -> None:
    shown = {command for page in PAGES for line in lines_of(page) for command, _ in called(line)}
    assert {
        ("noloco", "swarm"),
        ("noloco", "invite"),
        ("noloco", "join"),
        ("noloco", "eval"),
    } <= shown
