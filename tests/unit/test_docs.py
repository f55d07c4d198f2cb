"""The docs name what exists: files, links, and in the glossary the names of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
MOST_WORDS = 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    paths = re.findall(
        r"(?<![\w/.<-])((?:protocol|node|bootstrap|tests|benchmarks|docker|docs)/[\w/.-]*\w\.\w+)", text
    )
    assert [path for path in paths if not (ROOT / path).exists()] == []


def names_in_the_code() -> set[str]:
    names: set[str] = set()
    for package in ("protocol", "node", "bootstrap"):
        for file in (ROOT / package).rglob("*.py"):
            names |= {file.stem, file.parent.name}
            for found in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(found, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(found.name)
                elif isinstance(found, ast.Name) and isinstance(found.ctx, ast.Store):
                    names.add(found.id)
    return names


def test_the_glossary_is_short_sorted_and_true() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^- \*\*([^*]+)\*\*", text, re.MULTILINE)
    assert len(words) <= MOST_WORDS
    assert words == sorted(words)
    named = set(re.findall(r"`([\w.]+)`", text)) - {"code", "events.jsonl"}
    assert named - names_in_the_code() == set()


def test_the_map_names_what_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = {part for name in re.findall(r"`([A-Za-z_][\w.]*)`", text) for part in name.split(".")}
    assert named - names_in_the_code() - {"noloco", "py"} == set()
