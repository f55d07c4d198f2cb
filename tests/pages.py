"""python -m tests.pages: write the pages of docs/ that come from the code: the list of files, counts of walks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocol", "node", "bootstrap")
HEAD = """# Files

What each file is, by the first line of its docstring. `make pages` writes this page; how the folders depend on each
other is in [architecture.md](architecture.md).
"""


def first_line(file: Path) -> str:
    """Return the first line of a module's docstring; empty where it has none."""
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def _folder(folder: Path) -> Iterator[str]:
    files = [file for file in sorted(folder.glob("*.py")) if file.name != "__init__.py"]
    if files:
        yield f"\n## {folder.relative_to(ROOT).as_posix()}/\n"
        yield f"{first_line(folder / '__init__.py')}\n"
        yield "| file | what it is |\n|---|---|"
        for file in files:
            told = first_line(file).replace("|", "\\|")
            yield f"| {file.name} | {told} |"
    for below in sorted(path for path in folder.iterdir() if (path / "__init__.py").exists()):
        yield from _folder(below)


def files_page() -> str:
    """Return docs/files.md as of now."""
    return (
        "\n".join([HEAD.rstrip(), *(line for package in PACKAGES for line in _folder(ROOT / package))]) + "\n"
    )


def numbered(page: str) -> str:
    """Return docs/walks.md with the steps of each walk numbered, and its files counted."""
    head, *walks = page.split("\n## ")
    return "\n## ".join([head, *map(_numbered, walks)])


def _numbered(walk: str) -> str:
    numbers = count(1)
    walk = re.sub(r"^\d+\. ", lambda _: f"{next(numbers)}. ", walk, flags=re.MULTILINE)
    files = set(re.findall(r"^(?:\d+\.|    -) `([\w/]+\.py)`", walk, re.MULTILINE))
    return re.sub(r"In \d+ files\.", f"In {len(files)} files.", walk, count=1)


if __name__ == "__main__":
    (ROOT / "docs" / "files.md").write_text(files_page(), encoding="utf-8")
    walks_page = ROOT / "docs" / "walks.md"
    walks_page.write_text(numbered(walks_page.read_text(encoding="utf-8")), encoding="utf-8")
