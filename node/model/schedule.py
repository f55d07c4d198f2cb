"""The learning-rate schedule of the inner optimizer."""

import math

from protocol.manifest import Inner


def learning_rate(inner: Inner, step: int) -> float:
    """Linear warm-up to the peak, then a cosine down to the minimum, which holds beyond the last step.

    `step` counts the inner steps done before this one.
    """
    if step < inner.warmup_steps:
        return inner.learning_rate * (step + 1) / inner.warmup_steps
    progress = min(1.0, (step - inner.warmup_steps) / (inner.total_steps - inner.warmup_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return inner.min_learning_rate + (inner.learning_rate - inner.min_learning_rate) * cosine
