"""The limit on open files is raised as far as it goes, and told where that is too little."""

from __future__ import annotations

import resource

import pytest

from node.machine.open_files import LEAST, MOST, Limits, raised, take_open_files
from protocol.errors import ResourceError

NONE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "limit"),
    [
        (1024, 4096, 4096),
        (256, 256, 256),
        (1024, NONE, MOST),
        (1024, 2**20, MOST),
        (2**20, 2**20, 2**20),
        (NONE, NONE, NONE),
        (24, 40, 40),
    ],
)
def test_as_far_as_this_user_may_and_is_of_use(soft: int, hard: int, limit: int) -> None:
    assert raised(soft, hard) == limit


@pytest.mark.parametrize("hard", [24, 40, 64, LEAST - 1])
def test_too_few_are_one_sentence_with_what_to_do(hard: int) -> None:
    taken: list[Limits] = []
    with pytest.raises(ResourceError, match=rf"may have {hard} files open.*Raise the limit \(ulimit -n"):
        take_open_files(lambda: (16, hard), taken.append)
    assert taken == [(hard, hard)]


def test_a_limit_that_can_be_raised_is_and_a_system_that_refuses_is_no_end() -> None:
    taken: list[Limits] = []
    take_open_files(lambda: (24, 4096), taken.append)
    assert taken == [(4096, 4096)]

    def refuse(pair: Limits) -> None:
        raise ValueError("not allowed to raise maximum limit")

    take_open_files(lambda: (256, NONE), refuse)
    with pytest.raises(ResourceError, match="may have 24 files open"):
        take_open_files(lambda: (24, NONE), refuse)
