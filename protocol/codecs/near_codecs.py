"""The codecs for replicas that are near: how coarse they are, and how far apart replicas stay for it. Pure numbers.

Rounding to cells of c, by both of a pair, adds 2·c²/12 to the square of what they differ by, and c is a part of what
they were expected to differ by: SPARE times SPANNED standard deviations of it make half of the 2^bits cells. So a
meeting leaves the pair ρ² of its square distance apart, whatever the learning rate is.
"""

from __future__ import annotations

import math

BITS = {"mod4": 4, "mod3": 3, "mod2": 2}  # by codec
# Standard deviations of the difference that half of the 2^bits cells span. More of them make fewer blocks unread and
# a larger error. With these, and a difference as it was expected, one block in 200 is unread at most.
SPANNED = {2: 5.0, 3: 4.5, 4: 4.5}
SPARE = 1.1  # for so much more than the distance that a sample shows cells are made
CELL_STEPS = 4  # of a cell's byte to a factor of two
# cells are rounded up to the next step: the mean of the square of what that makes of them
ROUNDED_UP: float = (2.0 ** (2 / CELL_STEPS) - 1) / (2 / CELL_STEPS * math.log(2))


def kept_apart(codec: str) -> float:
    """ρ²: how much of the square of a pair's distance its rounding puts back, 0 for codecs that round by size."""
    if codec not in BITS:
        return 0.0
    cell = SPARE * SPANNED[BITS[codec]] / (1 << BITS[codec] - 1)
    return cell * cell / 6 * ROUNDED_UP
