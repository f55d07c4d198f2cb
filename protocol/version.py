"""The version of this program that runs here."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "noloco-node"


@cache
def own_version() -> str:
    """The version of the installed distribution; empty for a copy that was not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return ""
