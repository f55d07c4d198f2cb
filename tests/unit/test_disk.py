"""A file that cannot be written: what a person can do depends on why."""

from __future__ import annotations

import errno

import pytest

from protocol.files.keeping import advice_for


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "Free some space"),
        (errno.EDQUOT, "Free some space"),
        (errno.EFBIG, "Raise the limit on the size of files (ulimit -f)"),
        (errno.EACCES, "Check its permissions"),
    ],
)
def test_the_advice_fits_the_reason(number: int, advice: str) -> None:
    assert advice_for(OSError(number, "as the system says")) == advice
