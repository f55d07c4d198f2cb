"""docs/walks.md: each step's code names the next, or what carries on from the one to the other."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "walks.md").read_text(encoding="utf-8")
PLACE = r"`([\w/]+\.py)` `([\w.]+)`"
STEP = re.compile(rf"(?P<place>\d+\.|    -) {PLACE}(?: \((?P<way>[^)]*)\))?: ")


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


def path_of(file: str) -> Path:
    """Here, or in the package that it names, which is not imported for it."""
    if (ROOT / file).exists():
        return ROOT / file
    package = find_spec(file.partition("/")[0])
    assert package, file
    assert package.origin
    return Path(package.origin).parent.parent / file


@cache
def code_of(place: Place) -> ast.AST:
    node: ast.AST = ast.parse(path_of(place.file).read_text(encoding="utf-8"))
    for name in place.name.split("."):
        inside = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and child.name == name
            and "overload" not in [getattr(decorator, "id", "") for decorator in child.decorator_list]
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


def has(place: Place, carrier: str) -> bool:
    """Whether it names the carrier, is it or one of its methods, or of an object that was made with it."""
    owner, _, method = place.name.rpartition(".")
    if carrier in names_in(place) or carrier in (owner, method):
        return True
    made = list(ast.iter_child_nodes(code_of(Place(place.file, owner)))) if owner else []
    is_made = any(isinstance(node, ast.FunctionDef) and node.name == "__init__" for node in made)
    return is_made and carrier in names_in(Place(place.file, f"{owner}.__init__"))


def carries(way: str, before: Place, here: Place) -> bool:
    """By `X`, which both have; or by `X` of the function that registers it, which has both."""
    found = re.fullmatch(rf"by `(\w+)`(?: of {PLACE}(?:, which {PLACE} calls)?)?", way)
    assert found, way
    carrier = found[1]
    if not found[2]:
        return carrier in names_in(before) and carrier in names_in(here)
    registrar = Place(found[2], found[3])
    if registrar.last == carrier:  # called by `before`, which may have the same name
        return carrier in names_in(before) and here.last in names_in(registrar)
    if not has(before, carrier) or carrier not in names_in(registrar):
        return False
    if found[4]:
        return {registrar.last, here.last} <= names_in(Place(found[4], found[5]))
    return here.last in names_in(registrar) or registrar.last in names_in(here) or registrar == here


def open_calls(steps: list[Step]) -> dict[int, Place]:
    """The numbered steps that have not returned by the end of these, by their numbers."""
    called: dict[int, Place] = {}
    for number, step in enumerate([one for one in steps if not one.is_nested], 1):
        if back := re.fullmatch(r"back in step (\d+)", step.way):
            called = {one: place for one, place in called.items() if one <= int(back[1])}
        else:
            called[number] = step.place
    return called


def last_outer(steps: list[Step]) -> int:
    return max(number for number, step in enumerate(steps) if not step.is_nested)


def is_passed_on(steps: list[Step], number: int) -> bool:
    """Whether the code leads to this step, from the last one before it on its level, or the one it is nested in."""
    step, earlier = steps[number], steps[:number]
    outer = [one for one in earlier if not one.is_nested]
    if back := re.fullmatch(r"back in step (\d+)", step.way):
        return open_calls(earlier).get(int(back[1])) == step.place
    if left := re.fullmatch(r"at [\w ]+, with `(\w+)`", step.way):
        names = [left[1] in names_in(one.place) for one in steps]
        return any(names[:number]) and any(names[number:])
    parents = [outer[-1]] if outer else []
    if step.is_nested:
        parents += [one for one in earlier[last_outer(earlier) :] if one.is_nested]
    same = re.fullmatch(r"as in step (\d+)", step.way)
    if same and outer[int(same[1]) - 1].place != step.place:
        return False
    if step.way and not same:
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


def test_a_step_that_nobody_leads_to_is_found() -> None:
    steps = [
        Step(Place("node/service/trainer.py", "Trainer._step"), False, ""),
        Step(Place("node/rounds/rounds.py", "Rounds.retire"), False, ""),
    ]
    assert not is_passed_on(steps, 1)
    assert not carries(
        "by `Contribute` of `node/rounds/gossip.py` `PairAverager.serve`", steps[0].place, steps[1].place
    )


def test_a_step_is_not_returned_to_twice_removed() -> None:
    place = Place("node/service/trainer.py", "Trainer._train")
    one, two, other = (Step(place, False, way) for way in ("", "", ""))
    back_in_first, back_in_second = (Step(place, False, f"back in step {number}") for number in (1, 2))
    assert is_passed_on([one, two, other, back_in_second], 3)
    assert not is_passed_on([one, two, other, back_in_first, back_in_second], 4)


def test_what_both_must_have_is_missed_in_either() -> None:
    setter = Place("node/rounds/exchanges.py", "Exchanges.receive")
    waiter = Place("node/rounds/pair_exchange.py", "PairExchange.both_ways")
    neither = Place("node/service/trainer.py", "Trainer._step")
    assert carries("by `received`", setter, waiter)
    assert not carries("by `received`", neither, waiter)
    assert not carries("by `received`", setter, neither)


def test_what_nobody_left_is_not_found_later() -> None:
    writer = Step(Place("node/membership/view.py", "View.take"), False, "")
    reader = Step(
        Place("node/membership/view.py", "View.members"), False, "at another look, with `_by_stage`"
    )
    stranger = Step(Place("node/service/trainer.py", "Trainer._step"), False, "")
    assert is_passed_on([writer, reader], 1)
    assert not is_passed_on([stranger, reader], 1)
