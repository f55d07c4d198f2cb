"""python -m tests.look: report what a reader of the code would stumble over. Nothing fails by it.

Lengths, docstrings that begin with neither a verb nor a noun phrase, and words of the list in CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocol", "node", "bootstrap")
FOLDERS = (*PACKAGES, "tests", "benchmarks", "docker")
MOST_LINES, MOST_OF_A_FUNCTION = 500, 70
SHOWN = 15  # of each kind
# first words of sentences that say what is true in place of what the thing does
NEITHER = re.compile(
    r"(Who|Whoever|Whom|Whose|What|Where|When|Whether|How|They|Their|It|Its|Those|These|That|Of|As|In|By|"
    r"To|From|For|On|At|With|Without|Not|Is|Are|Has|Had|Was|Were)\b"
)
FOREIGN = re.compile(
    r"\b(whoever|whomever|so many|none of|as many as|is told|are told|was told|was had|who (is|are|has|was) \w+)\b",
    re.IGNORECASE,
)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Found(NamedTuple):
    """Something worth a look, and where it is."""

    kind: str
    place: str
    what: str


def lengths(source: str) -> Iterator[tuple[str, str]]:
    """Yield what is too long in a module, with its number of lines."""
    if (lines := source.count("\n")) > MOST_LINES:
        yield "file", f"{lines} lines"
    for found in ast.walk(ast.parse(source)):
        if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            assert found.end_lineno is not None
            if (lines := found.end_lineno - found.lineno + 1) > MOST_OF_A_FUNCTION:
                yield found.name, f"{lines} lines"


def first_lines(source: str) -> Iterator[tuple[int, str]]:
    """Yield the first line of each docstring of a module, with its number."""
    for found in ast.walk(ast.parse(source)):
        if isinstance(found, Documented) and (text := ast.get_docstring(found)):
            yield found.body[0].lineno, text.partition("\n")[0]


def looked_at(file: Path) -> Iterator[Found]:
    """Yield what a module of the product has for a look."""
    source, name = file.read_text(encoding="utf-8"), file.relative_to(ROOT).as_posix()
    for what, lines in lengths(source):
        yield Found("long", f"{name} {what}", lines)
    if name.split("/")[0] not in PACKAGES:
        return
    for number, line in first_lines(source):
        if line.startswith("Mutable state"):
            yield Found("state before what it is", f"{name}:{number}", line)
        elif NEITHER.match(line):
            yield Found("neither verb nor noun phrase", f"{name}:{number}", line)
    for number, line in enumerate(source.splitlines(), 1):
        if found := FOREIGN.search(line):
            yield Found("foreign", f"{name}:{number}", f"{found[0]}: {line.strip()}")


def main() -> None:
    """Print the number of findings of each kind, and the first of them."""
    kinds: dict[str, list[Found]] = {}
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for found in looked_at(file):
                kinds.setdefault(found.kind, []).append(found)
    for kind, all_found in kinds.items():
        print(f"{kind}: {len(all_found)}")
        for found in all_found[:SHOWN]:
            print(f"    {found.place}  {found.what}")
        if len(all_found) > SHOWN:
            print("    …")


if __name__ == "__main__":
    main()
