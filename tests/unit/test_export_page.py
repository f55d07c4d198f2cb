"""The commands and options that docs/export.md names, and their defaults, are those of the commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from bootstrap.tools_cli import app
from node.machine.limits import parse_size

PAGE = (Path(__file__).parent.parent.parent / "docs" / "export.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"(?ms)^## (\w+)\n(.*?)(?=^## |\Z)", PAGE))
COMMANDS = {"Export": "export", "Generate": "generate", "Evaluate": "eval"}


def options_of(command: str) -> dict[str, Any]:
    """Their defaults, by name."""
    commands: Any = typer.main.get_command(app)
    return {name: option.default for option in commands.commands[command].params for name in option.opts}


def test_three_commands_are_named() -> None:
    [examples] = re.findall(r"(?:^    noloco .*\n)+", PAGE, re.MULTILINE)[:1]
    assert "Three commands" in PAGE
    assert {line.split()[1] for line in examples.splitlines()} == set(COMMANDS.values())
    for line in examples.splitlines():
        command, named = line.split()[1], re.findall(r"--\w+", line)
        assert set(named) <= options_of(command).keys()
        assert ("--model" in named) != ("--join" in named)
    takes = {command for command in COMMANDS.values() if "--model" in options_of(command)}
    assert takes == {"generate", "eval"}
    assert all("--join" in options_of(command) for command in COMMANDS.values())


@pytest.mark.parametrize("section", COMMANDS)
def test_the_options_of_the_page_are_there(section: str) -> None:
    named = set(re.findall(r"`(--[a-z-]+)", SECTIONS[section]))
    assert named - options_of(COMMANDS[section]).keys() - {"--out"} == set()
    assert "--out" in options_of("export")


def test_the_defaults_are_those_of_the_page() -> None:
    export, generate = options_of("export"), options_of("generate")
    for name, default in (("--dtype", "fp32"), ("--shard-size", "2GB")):
        [row] = re.findall(rf"(?m)^\| `{name} .*$", PAGE)
        assert f"default {default}" in row
        assert export[name] == default
    assert export["--mean"] is False
    assert parse_size(export["--shard-size"]) == 2 * 10**9
    assert (generate["--temperature"], generate["--top-k"], generate["--top-p"]) == (0.0, 0, 1.0)
    assert "without it the likeliest token is always taken" in PAGE
