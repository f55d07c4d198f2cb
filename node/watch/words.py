"""Numbers as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """ "0.3 s", "32 s", "4.2 min", "1.5 h", "2.5 days"; "-" for none."""
    if seconds == 0:
        return "-"
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:,.1f} days"


def count(number: float) -> str:
    """Three digits and what they count: "950", "12,400", "1.24 million", "30.1 billion"."""
    for unit, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}" if number < 1e3 * unit else f"{number / unit:,.0f} {name}"
    return f"{number:,.0f}"
