"""Amounts of memory as people write and read them."""

from __future__ import annotations

import re

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    f"{letter}I": 2 ** (10 * power) for power, letter in enumerate("KMGT", start=1)
}


def parse_size(text: str) -> int:
    """Bytes of "4GiB", "800 MB", "1.5g" or "4294967296". Raises `ValueError`."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?)B?\s*", text, re.IGNORECASE)
    unit = UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise ValueError(f"{text!r} is no amount of memory: write it as 4GiB, 800MiB or 6GB")
    return int(float(found[1]) * unit)


def size(count: int) -> str:
    """Bytes for people: "85.3 GiB", "5.6 MiB"."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
