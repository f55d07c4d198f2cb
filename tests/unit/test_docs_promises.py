"""Each sentence of a page that has a table in tests/promises/ is held by a test, or the table says why it needs none.

docs/data.md has tests/promises/data.toml. An entry of it stands for one sentence, paragraphs, list items and rows of
tables alike; code blocks and headings promise nothing:

    [[sentence]]
    says = 'its first words, enough of them that only one sentence of the page begins so'
    tests = ["tests/unit/test_x.py::test_that_fails_when_the_sentence_is_false"]

Instead of `tests` it may have `why`, for an introduction or for a measurement and the command that repeats it.
A row is written as its cells with ` | ` between, a paragraph's bold label (**Order.**) is left out.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TABLES = sorted((ROOT / "tests" / "promises").glob("*.toml"))
each_table = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)

HEADING = re.compile(r"#+ ")
FENCE = re.compile(r"\s*```")
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.) +")
LABEL = re.compile(r"^\*\*[^*]+[.?!]\*\* ")
CODE = re.compile(r"`[^`]*`")
END = re.compile(r"[.?!][\"')*]* +")


def blocks_of(page: str) -> Iterator[str]:
    """Paragraphs, list items and rows of tables of a page in Markdown, each in one line."""
    block: list[str] = []
    in_fence = False
    row = 0
    for line in [*page.splitlines(), ""]:
        in_table = line.startswith("|")
        row = row + 1 if in_table else 0
        starts = not line.strip() or in_table or FENCE.match(line) or HEADING.match(line) or ITEM.match(line)
        if block and starts:
            yield " ".join(block)
            block = []
        if FENCE.match(line):
            in_fence = not in_fence
        elif in_fence or HEADING.match(line) or not line.strip():
            continue
        elif in_table:
            if row > 2:  # the first two are the names of the columns and a line
                yield " | ".join(cell.strip() for cell in line.strip("| ").split(" | "))
        elif block or ITEM.match(line) or not line.startswith("    "):
            block.append((line if block else ITEM.sub("", line)).strip())


def sentences_of(page: str) -> list[str]:
    sentences: list[str] = []
    for block in blocks_of(page):
        text = LABEL.sub("", block)
        if " | " in text:
            sentences.append(text)
            continue
        without_code = CODE.sub(lambda code: "x" * len(code.group()), text)
        ends = [0, *(end.end() for end in END.finditer(without_code)), len(text)]
        sentences += [text[a:b].strip() for a, b in pairwise(ends) if text[a:b].strip()]
    return sentences


def test_a_page_is_taken_apart() -> None:
    page = """# Heading. Nothing.

One sentence, with `noloco. Code` in it. Another
over two lines? noloco.json begins the third:

    code. Not a sentence.

**Label.** What it labels is **bold.** Last.

| column | another |
|---|---|
| `a` | First. Second |

```
Fenced. Code.
```
- An item of 1.5 lines
  and its end. Two.
1. Numbered.
"""
    assert sentences_of(page) == [
        "One sentence, with `noloco. Code` in it.",
        "Another over two lines?",
        "noloco.json begins the third:",
        "What it labels is **bold.**",
        "Last.",
        "`a` | First. Second",
        "An item of 1.5 lines and its end.",
        "Two.",
        "Numbered.",
    ]


def entries_of(table: Path) -> list[dict[str, list[str] | str]]:
    return list(tomllib.loads(table.read_text(encoding="utf-8"))["sentence"])


def words_of(entry: dict[str, list[str] | str]) -> str:
    says = entry["says"]
    assert isinstance(says, str)
    return says


def page_of(table: Path) -> list[str]:
    return sentences_of((ROOT / "docs" / f"{table.stem}.md").read_text(encoding="utf-8"))


@cache
def functions_in(file: Path) -> frozenset[str]:
    """Names of a module's functions, and `Class::name` of its classes' methods."""
    if not file.is_file():
        return frozenset()
    names: set[str] = set()
    for found in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(found, ast.ClassDef):
            methods = [
                part for part in found.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            names |= {f"{found.name}::{method.name}" for method in methods}
        elif isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(found.name)
    return frozenset(names)


def is_a_test(named: str) -> bool:
    file, _, name = named.partition("::")
    return name.split("::")[-1].startswith("test_") and name in functions_in(ROOT / file)


@each_table
def test_each_sentence_has_its_entry(table: Path) -> None:
    begins = [words_of(entry) for entry in entries_of(table)]
    held = {
        sentence: [words for words in begins if sentence.startswith(words)] for sentence in page_of(table)
    }
    assert [sentence for sentence, words in held.items() if not words] == [], "sentences without a test"
    assert {sentence: words for sentence, words in held.items() if len(words) > 1} == {}


@each_table
def test_each_entry_is_of_one_sentence(table: Path) -> None:
    page = page_of(table)
    counts = {
        words: sum(said.startswith(words) for said in page) for words in map(words_of, entries_of(table))
    }
    assert {words: count for words, count in counts.items() if count != 1} == {}


@each_table
def test_each_named_test_is_there(table: Path) -> None:
    for entry in entries_of(table):
        assert set(entry) in ({"says", "tests"}, {"says", "why"}), entry
        named = entry.get("tests", [])
        assert entry.get("why", named), f"neither a test nor a reason: {entry}"
        assert [test for test in named if not is_a_test(test)] == [], words_of(entry)
