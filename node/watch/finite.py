"""What is told to others is a finite number or nothing: NaN and infinity are no JSON, and no field of a record."""

from __future__ import annotations

import math
from typing import Any


def finite(value: float | None) -> float | None:
    """`value`, or None for NaN and infinity."""
    return value if value is not None and math.isfinite(value) else None


def finite_only(fields: dict[str, Any]) -> dict[str, Any]:
    """The same fields with None in the place of NaN and infinity."""
    return {name: finite(value) if isinstance(value, float) else value for name, value in fields.items()}
