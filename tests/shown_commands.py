"""The commands that the pages show, and what tests/data/shown_commands.toml says of each."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OURS = "noloco|noloco-node|noloco-bootstrap|python|[.]venv/bin/python"
PROGRAMS = f"{OURS}|pipx?|uv|lm_eval|make|git|docker|sudo|runpodctl|vastai"
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)  # has what is printed
COMMAND = re.compile(rf"^    ((?:{PROGRAMS})(?: .*)?)$", re.MULTILINE)


def commands_of(page: str) -> list[str]:
    """Those of its indented blocks in their order, each in one line, without the remark behind it."""
    whole = FENCED.sub("", page).replace("\\\n", " ")
    return [" ".join(re.sub(r"\s#\s.*", "", line).split()) for line in COMMAND.findall(whole)]


def shown() -> list[str]:
    """Those of all pages, each once."""
    return list(
        dict.fromkeys(line for page in PAGES for line in commands_of(page.read_text(encoding="utf-8")))
    )


def table() -> list[dict[str, Any]]:
    """Its entries: `begins`, and `run` with `prints`, or `tests`, or `why`."""
    text = (ROOT / "tests" / "data" / "shown_commands.toml").read_text(encoding="utf-8")
    return list(tomllib.loads(text)["command"])


def entry_of(command: str) -> dict[str, Any] | None:
    """The one with the longest beginning of the command."""
    fitting = [entry for entry in table() if command.startswith(entry["begins"])]
    return max(fitting, key=lambda entry: len(entry["begins"]), default=None)


def to_run(where: str) -> list[tuple[str, str]]:
    """(command, what it prints) of those to run "alone" or "in a run", in the table's order."""
    entries = [entry["begins"] for entry in table()]
    found = [(command, entry) for command in shown() if (entry := entry_of(command))]
    here = [(command, entry) for command, entry in found if entry.get("run") == where]
    return [
        (command, entry["prints"])
        for command, entry in sorted(here, key=lambda one: entries.index(one[1]["begins"]))
    ]
