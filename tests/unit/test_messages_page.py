"""docs/messages.md has each line that a node says while it lives, and none that it does not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8")
LEVELS = ("info", "warning", "error")
# where sentences of all kinds go through
THROUGH = {"node/watch/events.py", "node/service/telling.py", "protocol/supervision.py"}


class Said(NamedTuple):
    file: str
    event: str  # "" where it has none
    fixed: tuple[str, ...]  # the parts of its sentence that are always the same

    @property
    def name(self) -> str:
        return f"{self.file}: {' '.join(self.fixed)[:40]}"


def literals(sentence: ast.expr) -> Iterator[str]:
    for part in ast.walk(sentence):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield from re.split(r"%[\w.,]+|\s%s\s", part.value)


def said() -> Iterator[Said]:
    for file in sorted([*(ROOT / "node").rglob("*.py"), *(ROOT / "protocol").rglob("*.py")]):
        place = file.relative_to(ROOT).as_posix()
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args):
                continue
            is_log = isinstance(call.func.value, ast.Name) and call.func.value.id == "logger"
            if call.func.attr not in (LEVELS if is_log else ("say", "warn")):
                continue
            event = call.args[1] if not is_log and len(call.args) > 1 else None
            kind = event.value if isinstance(event, ast.Constant) else ""
            yield Said(place, str(kind), tuple(part for part in literals(call.args[0]) if len(part) > 3))


SAID = [each for each in said() if each.event or (each.fixed and each.file not in THROUGH)]
EVENTS = sorted({each.event for each in SAID if each.event})


def test_the_code_was_found() -> None:
    assert len(SAID) > 70
    assert {"no-peer", "serving", "clock-jumped"} <= set(EVENTS)


@pytest.mark.parametrize("event", EVENTS)
def test_each_event_that_is_said_has_an_entry(event: str) -> None:
    assert re.search(rf"^\| [^|]*`{event}`[^|]*\|", PAGE, re.MULTILINE)


@pytest.mark.parametrize("each", [each for each in SAID if not each.event], ids=lambda each: each.name)
def test_each_line_without_an_event_has_an_entry(each: Said) -> None:
    """By three words that follow one another in one of its fixed parts."""
    plain = " ".join(re.findall(r"[\w'-]+", PAGE))
    words = [re.findall(r"[\w'-]+", part) for part in each.fixed]
    threes = [" ".join(part[start : start + 3]) for part in words for start in range(max(1, len(part) - 2))]
    assert any(three in plain for three in threes if three), each.fixed


def test_no_entry_is_of_an_event_that_is_gone() -> None:
    known = set(re.findall(r"`([a-z-]+)`", " ".join(re.findall(r"^\| ([^|]*)\|", PAGE, re.MULTILINE))))
    assert known == set(EVENTS)
