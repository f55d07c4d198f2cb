"""Imports run one way: protocol ← node ← bootstrap, and within node/ from each floor to those below it."""

from __future__ import annotations

import ast
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
    "storage",
    "data",
    "model",
    "giving",
    "links",
    "membership",
    "context",
    "pipeline",
    "rounds",
    "state",
    "service",
    "process",
)
PACKAGES = ("protocol", "node", "bootstrap")
LAB = "bootstrap.lab"
# of protocol/, lowest first; those of one line do not know of each other. Below them are the modules at its top.
WINGS = ({"files", "codecs"}, {"records"}, {"run"}, {"access"}, {"transport", "messages"}, {"rpc"})
MOST_AT_THE_TOP = 5


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


def modules() -> dict[str, Path]:
    """Each module of the three packages by its full name."""
    files = (file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py")))
    return {module_of(file).removesuffix(".__init__"): file for file in files}


def type_only(tree: ast.Module) -> set[ast.AST]:
    """What stands below `if TYPE_CHECKING`."""
    tests = (node for node in ast.walk(tree) if isinstance(node, ast.If))
    only = (node for node in tests if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING")
    return {below for node in only for below in ast.walk(node)}


def arrows(*, of_types: bool) -> dict[str, set[str]]:
    """Which modules each imports, in functions too; those for types alone only where that is asked for."""
    there, found = modules(), dict[str, set[str]]()
    for module, file in there.items():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        left_out = set[ast.AST]() if of_types else type_only(tree)
        found[module] = {
            name if (name := f"{node.module}.{alias.name}") in there else node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module and not node.level and node not in left_out
            for alias in node.names
        } & there.keys() - {module}
    return found


def circles(of: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other on whatever detour, each with the others of its circle."""

    def reached(module: str) -> set[str]:
        seen, ahead = set[str](), [module]
        while ahead:
            new = of[ahead.pop()] - seen
            seen |= new
            ahead += new
        return seen

    ways = {module: reached(module) for module in of}
    found = {tuple(sorted(b for b in ways[a] if a in ways[b])) for a in of if a in ways[a]}
    return sorted(map(list, found))


def test_no_modules_import_each_other() -> None:
    assert circles(arrows(of_types=False)) == []


def test_no_modules_need_each_other_for_types() -> None:
    assert circles(arrows(of_types=True)) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]


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


def wing_of(module: str) -> str:
    """Return the folder of protocol/ in which a module is; empty for one at its top."""
    parts = module.split(".")
    return parts[1] if parts[1:] and (ROOT / "protocol" / parts[1]).is_dir() else ""


def test_the_wings_of_protocol_import_one_way() -> None:
    level = {wing: floor for floor, wings in enumerate(WINGS) for wing in wings} | {"": -1}
    climbing = [
        f"{name} imports {module}"
        for name, imported in arrows(of_types=True).items()
        for module in imported
        if name.startswith("protocol.") and wing_of(name) != wing_of(module)
        if level[wing_of(module)] >= level[wing_of(name)]
    ]
    assert climbing == []


def test_protocol_has_a_small_ground_floor() -> None:
    at_the_top = {file.stem for file in (ROOT / "protocol").glob("*.py")} - {"__init__"}
    assert len(at_the_top) <= MOST_AT_THE_TOP, at_the_top


def test_nothing_outside_the_lab_imports_it() -> None:
    """A volunteer's node needs none of it; `bootstrap/from_lab.py` finds what commands take from it."""
    climbing = [
        f"{name} imports {module}"
        for name, imported in arrows(of_types=True).items()
        for module in imported
        if module.startswith(LAB) and not name.startswith(LAB)
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


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by their names alone: of two it collects one, and fails when both are asked for."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
