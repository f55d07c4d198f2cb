"""Prose for people is broken between words at the terminal's width: nothing prints it past what does that."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
THAT_BREAK = "node/watch/words.py", "node/watch/screen.py", "bootstrap/display.py"
SENTENCE = 25  # letters of a text with blanks: what is shorter fits


def files() -> list[str]:
    found = (
        path.relative_to(ROOT).as_posix()
        for house in ("node", "bootstrap")
        for path in (ROOT / house).rglob("*.py")
    )
    return sorted(name for name in found if name not in THAT_BREAK)


def sentences(call: ast.Call) -> Iterator[str]:
    """The literal parts of what a call is given."""
    for argument in call.args:
        for part in ast.walk(argument):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value


def passes_by(call: ast.Call) -> bool:
    """Whether the terminal would break what this call prints: `print`, `typer.echo`, or a console told not to."""
    called = ast.unparse(call.func)
    if any(keyword.arg == "soft_wrap" for keyword in call.keywords):
        return True
    is_printed = called in ("print", "typer.echo", "click.echo")
    return is_printed and any(len(text) > SENTENCE and " " in text.strip() for text in sentences(call))


@pytest.mark.parametrize("name", files())
def test_prose_is_printed_by_what_breaks_it_between_words(name: str) -> None:
    calls = (node for node in ast.walk(ast.parse((ROOT / name).read_text())) if isinstance(node, ast.Call))
    assert [f"{name}:{call.lineno}" for call in calls if passes_by(call)] == []
