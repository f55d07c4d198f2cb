"""docs/walks.md: each step's code names the next, or what carries on from the one to the other."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "walks.md").read_text(encoding="utf-8")
PLACE = r"`([\w/]+\.py)` `([\w.]+)`"
STEP = re.compile(rf"(?P<place>\d+\.|    -) {PLACE}(?: \((?P<way>[^)]*)\))?: ")
# Passages that this repository's code does not make: p2pd and hivemind carry them, or time passes
UNSEEN = {"over the wire, by p2pd", "over the wire, by hivemind", "at another node", "at the next microbatch"}


class Place(NamedTuple):
    """A function, or a class, and its file."""

    file: str
    name: str

    @property
    def last(self) -> str:
        return self.name.rsplit(".", 1)[-1]


class Step(NamedTuple):
    place: Place
    is_nested: bool
    way: str


def walks() -> dict[str, list[Step]]:
    """The steps of each, by its heading."""
    found: dict[str, list[Step]] = {}
    for part in PAGE.split("\n## ")[1:]:
        heading, *lines = part.splitlines()
        steps = found[heading] = []
        for line in lines:
            if re.match(r"\s*(\d+\.|-) ", line):
                step = STEP.match(line)
                assert step, line
                steps.append(Step(Place(*step.groups()[1:3]), line.startswith(" "), step["way"] or ""))
    return found


@cache
def code_of(place: Place) -> ast.AST:
    node: ast.AST = ast.parse((ROOT / place.file).read_text(encoding="utf-8"))
    for name in place.name.split("."):
        inside = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name == name
        ]
        assert len(inside) == 1, f"{place.file} has no {place.name}"
        node = inside[0]
    return node


@cache
def names_in(place: Place) -> frozenset[str]:
    """All names that its code has, its own left out unless it says it again."""
    own = code_of(place)
    found = set()
    for node in ast.walk(own):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node is not own:
            found.add(node.name)
    return frozenset(found)


def carries(way: str, before: Place, here: Place) -> bool:
    """By `X` of the function that registers it: who goes before has X, or is its; who registers has both."""
    found = re.fullmatch(rf"by `(\w+)` of {PLACE}(?:, which {PLACE} calls)?", way)
    assert found, way
    carrier, registrar = found[1], Place(found[2], found[3])
    has_carrier = carrier in names_in(before) or before.name.startswith(f"{carrier}.")
    if found[4]:
        caller = Place(found[4], found[5])
        return (
            has_carrier and carrier in names_in(registrar) and {registrar.last, here.last} <= names_in(caller)
        )
    knows = here.last in names_in(registrar) or registrar.last in names_in(here) or registrar == here
    return has_carrier and carrier in names_in(registrar) and knows


def is_passed_on(steps: list[Step], number: int) -> bool:
    """Whether the code leads to this step, from the last one before it on its level, or the one it is nested in."""
    step, earlier = steps[number], steps[:number]
    if step.way in UNSEEN:
        return bool(code_of(step.place))
    outer = [one for one in earlier if not one.is_nested]
    if back := re.fullmatch(r"back in step (\d+)", step.way):
        return outer[int(back[1]) - 1].place == step.place
    parents = [outer[-1]] if outer else []
    if step.is_nested:
        parents += [one for one in earlier[earlier.index(outer[-1]) :] if one.is_nested]
    if step.way:
        return any(carries(step.way, parent.place, step.place) for parent in parents)
    return not parents or any(step.place.last in names_in(parent.place) for parent in parents)


WALKS = walks()
STEPS = [(heading, number) for heading, steps in WALKS.items() for number in range(len(steps))]


def test_there_are_four_walks() -> None:
    assert list(WALKS) == ["A microbatch", "A round", "A record", "A frame"]
    assert min(map(len, WALKS.values())) >= 20


@pytest.mark.parametrize(("heading", "number"), STEPS)
def test_each_step_is_there_and_the_one_before_leads_to_it(heading: str, number: int) -> None:
    steps = WALKS[heading]
    assert code_of(steps[number].place)
    assert is_passed_on(steps, number), steps[number]


@pytest.mark.parametrize("heading", list(WALKS))
def test_steps_are_numbered_and_files_are_counted(heading: str) -> None:
    part = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", part, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    told = re.search(r"In (\d+) files\.", part)
    assert told
    assert int(told[1]) == len({step.place.file for step in WALKS[heading]})


def test_a_step_that_nobody_leads_to_is_found() -> None:
    steps = [
        Step(Place("node/trainer.py", "Trainer._step"), False, ""),
        Step(Place("node/rounds/rounds.py", "Rounds.retire"), False, ""),
    ]
    assert not is_passed_on(steps, 1)
    assert not carries(
        "by `Contribute` of `node/rounds/rounds.py` `Rounds.serve`", steps[0].place, steps[1].place
    )
