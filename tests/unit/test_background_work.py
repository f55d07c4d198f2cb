"""Nothing in protocol/ or node/ starts a task but its owner, `protocol.supervision`."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWNER = ROOT / "protocol" / "supervision.py"
OF_ANYTHING = {
    "create_task",
    "ensure_future",
    "run_coroutine_threadsafe",
}  # of a loop, of a group, of asyncio
OF_ASYNCIO = {"gather", "TaskGroup"}


def starters(source: str) -> list[tuple[int, str]]:
    """(line, name) of everything in a module that starts a task, called or passed on."""
    found = ast.walk(ast.parse(source))
    return sorted((getattr(node, "lineno", 0), name) for node in found for name in _started_by(node))


def _started_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and node.module == "asyncio":
        return [alias.name for alias in node.names if alias.name in OF_ANYTHING | OF_ASYNCIO]
    if not isinstance(node, ast.Attribute):
        return []
    is_asyncio = isinstance(node.value, ast.Name) and node.value.id == "asyncio"
    return [node.attr] if node.attr in OF_ANYTHING or (is_asyncio and node.attr in OF_ASYNCIO) else []


def test_only_a_supervisor_starts_tasks() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for folder in ("protocol", "node", "bootstrap/lab/in_memory")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != OWNER
        for line, name in starters(path.read_text(encoding="utf-8"))
    ]
    assert not found, "use protocol.supervision: " + ", ".join(found)


def test_the_search_finds_what_it_looks_for() -> None:
    assert starters(
        "loop.create_task(x)\nspawn = asyncio.ensure_future\nasyncio.gather(x)\nfrom asyncio import TaskGroup\n"
    ) == [(1, "create_task"), (2, "ensure_future"), (3, "gather"), (4, "TaskGroup")]
