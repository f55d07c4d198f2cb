"""What is told to others is a finite number or nothing: NaN and infinity are no JSON, and no field of a record."""

from __future__ import annotations

import math
from typing import Any


def finite(value: float | None) -> float | None:
    """`value`, or None for NaN and infinity."""
    return value if value is not None and math.isfinite(value) else None


def finite_only(value: Any) -> Any:
    """The same with None in the place of NaN and infinity, at any depth."""
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, dict):
        return {key: finite_only(inner) for key, inner in value.items()}
    return [finite_only(inner) for inner in value] if isinstance(value, list | tuple) else value
