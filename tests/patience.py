"""How long a test waits for what must happen on a machine that may have other things to do.

Patience is not a deadline: what a deadline does is tested under the virtual clock, where it costs nothing. Where a
real process is waited for, only that it comes at all matters.
"""

from __future__ import annotations

import os

VARIABLE = "TEST_PATIENCE"  # a factor for all of it, for machines slower than two cores of 2020


def patience(seconds: float) -> float:
    return seconds * float(os.environ.get(VARIABLE, "1"))
