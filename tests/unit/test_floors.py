"""Imports run one way: protocol ← node ← bootstrap, and within node/ from each floor to those below it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# Lowest first. A part imports those above it in this list, never those below; the modules at the top of node/ that
# are not named here are on the last floor.
FLOORS = (
    "machine",
    "config",
    "watch",
    "data",
    "model",
    "giving",
    "links",
    "membership",
    "context",
    "pipeline",
    "rounds",
    "state",
)
PACKAGES = ("protocol", "node", "bootstrap")


def imports_of(file: Path) -> Iterator[str]:
    """Full names of the modules that it imports, anywhere in it."""
    for found in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(found, ast.ImportFrom) and found.module and not found.level:
            yield found.module
        elif isinstance(found, ast.Import):
            yield from (alias.name for alias in found.names)


def floor_of(module: str) -> int:
    part = module.split(".")[1] if "." in module else ""
    return FLOORS.index(part) if part in FLOORS else len(FLOORS)


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_one_way(package: str) -> None:
    above = PACKAGES[PACKAGES.index(package) + 1 :]
    climbing = [
        f"{module_of(file)} imports {module}"
        for file in sorted((ROOT / package).rglob("*.py"))
        for module in imports_of(file)
        if module.split(".")[0] in above
    ]
    assert climbing == []


def test_the_floors_of_a_node_import_one_way() -> None:
    climbing = [
        f"{module_of(file)} imports {module}"
        for file in sorted((ROOT / "node").rglob("*.py"))
        for module in imports_of(file)
        if module.startswith("node.") and floor_of(module) > floor_of(module_of(file))
    ]
    assert climbing == []


def test_every_folder_has_its_floor() -> None:
    folders = {folder.name for folder in (ROOT / "node").iterdir() if (folder / "__init__.py").exists()}
    assert folders <= set(FLOORS)


def test_the_map_names_every_file_and_nothing_else() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = {Path(name).name for name in re.findall(r"[\w/]+\.py\b", text)}
    there = {
        file.name
        for folder in (*PACKAGES, "tests", "docker", "benchmarks")
        for file in (ROOT / folder).rglob("*.py")
    }
    assert named <= there, "files that are gone"
    mapped = [
        file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if file.name != "__init__.py"
    ]
    assert {file.name for file in mapped} <= named, "files that the map lacks"
