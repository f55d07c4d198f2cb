"""A machine that computes the same twice finds out when it is broken, and never when it is not."""

from __future__ import annotations

import pytest
import torch

from node.model.self_check import DOUBTFUL, EAGER, SelfCheck
from protocol.errors import Unrepeatable

EVERY = 10


def outputs() -> torch.Tensor:
    return torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(3))


def flipped(values: torch.Tensor, bit: int) -> torch.Tensor:
    broken = values.clone()
    broken.view(torch.int32).view(-1)[77] ^= 1 << bit
    return broken


def test_what_is_the_same_again_is_no_problem_and_one_in_so_many_is_compared() -> None:
    check = SelfCheck(EVERY)
    for _ in range(100):
        check.compare(outputs(), outputs)
    assert (check.compared, check.failed) == (10, 0)


def test_rounding_is_no_problem() -> None:
    check = SelfCheck(1)
    check.compare(outputs(), lambda: outputs() * (1 + 1e-6))
    check.compare(outputs(), lambda: outputs().bfloat16())
    up, down = (outputs() * (1 + sign * 1e-3) for sign in (1, -1))
    check.compare(up.bfloat16(), lambda: down.bfloat16())  # some are neighbours
    assert check.failed == 0


@pytest.mark.parametrize("bit", [22, 27, 30])
def test_a_flipped_bit_is_found_where_it_matters(bit: int) -> None:
    with pytest.raises(Unrepeatable):
        SelfCheck(1).compare(flipped(outputs(), bit), outputs)


def test_not_a_number_and_old_memory_are_found() -> None:
    for other in (torch.full_like(outputs(), torch.nan), outputs().flip(0)):
        with pytest.raises(Unrepeatable):
            SelfCheck(1).compare(other, outputs)


def test_after_a_failure_it_looks_more_often_for_a_while() -> None:
    check = SelfCheck(1_000)
    check.doubt()
    for _ in range(EAGER * DOUBTFUL):
        check.compare(outputs(), outputs)
    assert check.compared == DOUBTFUL
    for _ in range(900):
        check.compare(outputs(), outputs)
    assert check.compared == DOUBTFUL
