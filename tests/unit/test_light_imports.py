"""Help, mistakes and orders come at once: what the commands import to begin with loads neither torch nor hivemind."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.unit.test_floors import modules, type_only

SLOW = {"torch", "hivemind", "scipy", "transformers", "datasets"}


def at_once(tree: ast.Module) -> Iterator[str]:
    """Full names of what a module imports as it is imported: not in functions, not for types alone."""
    later = {below for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
             for below in ast.walk(node)} | type_only(tree)  # fmt: skip
    for node in ast.walk(tree):
        if node in later:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def loaded(module: str) -> dict[str, str]:
    """Each module that `module` loads, with the one that loads it."""
    there, by, ahead = modules(), {module: ""}, [module]
    while ahead:
        here = ahead.pop()
        for name in at_once(ast.parse(there[here].read_text(encoding="utf-8"))):
            parts = name.split(".")
            for count in range(1, len(parts) + 1):  # a package's own file comes first
                part = ".".join(parts[:count])
                if part not in by:
                    by[part] = here
                    ahead += [part] * (part in there)
    return by


@pytest.mark.parametrize("module", ["bootstrap.tools_cli", "bootstrap.found_cli", "node.cli"])
def test_a_command_begins_without_what_takes_seconds(module: str) -> None:
    by = loaded(module)
    assert {name: by[name] for name in SLOW & by.keys()} == {}
    assert "protocol.errors" in by


def test_what_trains_is_seen_to_load_torch() -> None:
    assert "torch" in loaded("node.process.serving")
