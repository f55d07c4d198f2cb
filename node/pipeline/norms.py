"""Whether a gradient is out of all proportion to those that the same stage gave before. Pure.

One such gradient, finite as it is, makes a whole step worthless: clipped to its norm, the others of its batch vanish.
"""

from __future__ import annotations

from collections import deque
from statistics import median

HISTORY = 64
ENOUGH = 5  # gradients before one is judged
PROPORTION = 1_000.0  # times the median; honest norms of a run differ by less than a tenth of it


class Norms:
    """Mutable state: the last `HISTORY` norms.

    The median holds while fewer than half of them lie. What is out of proportion enters as the most that is not, so
    that a scale that has changed for good is accepted after half a history.
    """

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=HISTORY)

    def is_outlying(self, norm: float) -> bool:
        """Judge the norm of a gradient, finite, and remember it."""
        most = PROPORTION * median(self._norms) if len(self._norms) >= ENOUGH else 0.0
        self._norms.append(min(norm, most) if most else norm)
        return norm > most > 0
