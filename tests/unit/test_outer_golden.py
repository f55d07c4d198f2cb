"""The outer step against golden vectors: numbers that the paper authors' public implementation gave.

Checks tests/data/golden/outer_step.json and every file named with `--golden FILE`; `format` in the file
explains its fields. Each round, or inner step, is started from the file's own inputs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from node.model.outer import OuterSettings, contribution, outer_step
from tests.unit.outer_reference import outer_step_reference

OWN_FILE = Path(__file__).parents[1] / "data" / "golden" / "outer_step.json"
TOLERANCES = {torch.float64: 1e-14, torch.float32: 5e-7}  # absolute, for values of order one; from the file
KINDS = ("noloco", "diloco", "noloco_with_adam")
Group = list[int]


class MalformedGolden(Exception):
    """A golden file that cannot be used; the text says where and why."""


@dataclass
class State:
    """One replica's φ, θ and δ, each all parameters of the model in one flat tensor as in production."""

    slow: Tensor
    fast: Tensor
    momentum: Tensor


@dataclass(frozen=True)
class Case:
    kind: str
    dtype: torch.dtype
    world: int
    settings: OuterSettings
    sizes: tuple[int, ...]  # entries of each parameter
    raw: Mapping[str, Any]

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Case:
        hyper = raw["hyper"]
        case = cls(
            kind=raw["kind"],
            dtype={"float64": torch.float64, "float32": torch.float32}[raw["dtype"]],
            world=raw["world"],
            settings=OuterSettings(*(float(hyper[name]) for name in ("alpha", "beta", "gamma"))),
            sizes=tuple(math.prod(shape) for shape in raw["shapes"]),
            raw=raw,
        )
        if case.kind not in KINDS:
            raise MalformedGolden(f"kind {case.kind!r} is none of {', '.join(KINDS)}")
        if not raw["steps" if case.kind == "noloco_with_adam" else "rounds"]:
            raise MalformedGolden("there is nothing to check in it")
        return case

    def flat(self, parameters: Sequence[Sequence[str]]) -> Tensor:
        if tuple(map(len, parameters)) != self.sizes:
            raise MalformedGolden(f"parameters of {[*map(len, parameters)]} entries, not {[*self.sizes]}")
        return torch.tensor([float(value) for part in parameters for value in part], dtype=self.dtype)

    def states(self, ranks: Sequence[Mapping[str, Any]]) -> list[State]:
        if len(ranks) != self.world:
            raise MalformedGolden(f"{len(ranks)} ranks in a world of {self.world}")
        return [State(*(self.flat(rank[name]) for name in ("slow", "fast", "momentum"))) for rank in ranks]

    def groups(self, groups: Sequence[Group]) -> Sequence[Group]:
        if sorted(rank for group in groups for rank in group) != list(range(self.world)):
            raise MalformedGolden(f"groups {groups} do not hold each of {self.world} ranks once")
        return groups


def read_golden(path: Path) -> dict[str, Mapping[str, Any]]:
    """The cases of a file by name. Raises `MalformedGolden` when it is not one."""
    try:
        cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
        named = {str(case["name"]): case for case in cases}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise MalformedGolden(f"{path} is not a golden file: {error!r}") from error
    if not named or len(named) != len(cases):
        raise MalformedGolden(f"{path} has no cases, or several of one name")
    return named


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "golden" in metafunc.fixturenames:
        metafunc.parametrize(
            "golden", list(golden_parameters([OWN_FILE, *metafunc.config.getoption("--golden")]))
        )


def golden_parameters(paths: Sequence[Path]) -> Iterator[Any]:
    """Every case as (its place, itself), or (what is wrong with the file, None)."""
    for path in paths:
        try:
            for name, raw in read_golden(path).items():
                yield pytest.param((f"{path}, case {name}", raw), id=f"{path.name}:{name}")
        except MalformedGolden as error:
            yield pytest.param((str(error), None), id=f"{path.name}:malformed")


def check(golden: tuple[str, Mapping[str, Any] | None], step: Any) -> None:
    """Run one case with `step`; fails with the place in the file, for broken cases too."""
    place, raw = golden
    if raw is None:
        pytest.fail(place, pytrace=False)
    try:
        case = Case.parse(raw)
        run = check_adam_case if case.kind == "noloco_with_adam" else check_rounds
        run(case, step)
    except (MalformedGolden, LookupError, TypeError, ValueError, AttributeError) as error:
        pytest.fail(f"{place} is malformed: {error!r}", pytrace=False)


def check_rounds(case: Case, step: Any) -> None:
    for entry in case.raw["rounds"]:
        states = case.states(entry["in"])
        for group in case.groups(entry["groups"]):
            step([states[rank] for rank in group], case.settings)
        compare(case, f"round {entry['round']}", states, entry["out"])


def check_adam_case(case: Case, step: Any) -> None:
    """All in one go, for Adam's moments are not in the file: they stay local and outlive outer steps."""
    start = case.flat(case.raw["start"])
    targets = [case.flat(target) for target in case.raw["targets"]]
    states = [State(start.clone(), start.clone(), torch.zeros_like(start)) for _ in targets]
    adam = case.raw["adam"]
    optimizers = [
        torch.optim.Adam(
            [state.fast],
            lr=case.raw["inner_lr"],
            betas=tuple(adam["betas"]),
            eps=adam["eps"],
            weight_decay=adam["weight_decay"],
        )
        for state in states
    ]
    for entry in case.raw["steps"]:
        for state, target, optimizer in zip(states, targets, optimizers, strict=True):
            state.fast.grad = state.fast - target
            optimizer.step()
        if entry["step"] % case.raw["k"] == 0:
            for group in case.groups(entry["groups"]):
                step([states[rank] for rank in group], case.settings)
        compare(case, f"step {entry['step']}", states, entry["after"])


def compare(case: Case, when: str, states: Sequence[State], expected: Sequence[Mapping[str, Any]]) -> None:
    for rank, (state, right) in enumerate(zip(states, case.states(expected), strict=True)):
        for name in ("slow", "fast", "momentum"):
            error = (getattr(state, name) - getattr(right, name)).abs().max().item()
            # not error > tolerance: NaN must fail
            if not error <= TOLERANCES[case.dtype]:
                pytest.fail(
                    f"{when}, rank {rank}: {name} is off by {error:.3g} of {TOLERANCES[case.dtype]:.3g}"
                )


def production_step(group: Sequence[State], settings: OuterSettings) -> None:
    """Each member gives one tensor, gets the mean, and updates in place."""
    mean_z = torch.stack([contribution(state.fast, state.slow, settings) for state in group]).mean(0)
    for state in group:
        outer_step(state.slow, state.momentum, mean_z, settings)
        state.fast.copy_(state.slow)


def reference_step(group: Sequence[State], settings: OuterSettings) -> None:
    before, fast, kept = ([getattr(state, name) for state in group] for name in ("slow", "fast", "momentum"))
    slow, momentum = outer_step_reference(before, fast, kept, settings)
    for state, new_slow, new_momentum in zip(group, slow, momentum, strict=True):
        state.slow, state.momentum = new_slow, new_momentum
        state.fast.copy_(new_slow)


@pytest.mark.parametrize("step", [production_step, reference_step])
def test_golden_vectors_of_the_outer_step(golden: tuple[str, Mapping[str, Any] | None], step: Any) -> None:
    check(golden, step)


def broken_files() -> dict[str, tuple[str, str]]:
    """By name: a file's text, and a piece of the message that it must cause."""
    good = json.loads(OWN_FILE.read_text(encoding="utf-8"))["cases"][0]

    def with_change(**changes: Any) -> str:
        return json.dumps({"cases": [{**good, **changes}]})

    first = good["rounds"][0]
    short = [{**rank, "slow": rank["slow"][:1]} for rank in first["in"]]
    words = [{**rank, "slow": [["x"] * 3, ["y"] * 4]} for rank in first["in"]]
    wrong = [{**rank, "slow": [["nan"] * 3, ["nan"] * 4]} for rank in first["out"]]
    return {
        "not-json": ("{", "not a golden file"),
        "no-cases": ("[]", "not a golden file"),
        "empty": ('{"cases": []}', "no cases"),
        "unknown-kind": (with_change(kind="other"), "kind 'other'"),
        "unknown-dtype": (with_change(dtype="bfloat16"), "bfloat16"),
        "no-hyper": (with_change(hyper={}), "alpha"),
        "no-rounds": (with_change(rounds=[]), "nothing to check"),
        "wrong-world": (with_change(world=3), "2 ranks in a world of 3"),
        "missing-parameter": (with_change(rounds=[{**first, "in": short}]), "entries"),
        "words": (with_change(rounds=[{**first, "in": words}]), "could not convert"),
        "rank-left-out": (with_change(rounds=[{**first, "groups": [[0]]}]), "groups"),
        "not-a-number": (with_change(rounds=[{**first, "out": wrong}]), "slow is off by nan"),
    }


@pytest.mark.parametrize("name", broken_files())
def test_a_malformed_golden_file_fails_with_its_place(name: str, tmp_path: Path) -> None:
    text, message = broken_files()[name]
    path = tmp_path / "broken.json"
    path.write_text(text, encoding="utf-8")
    (parameter,) = golden_parameters([path])
    with pytest.raises(pytest.fail.Exception, match=message):
        check(parameter.values[0], production_step)
