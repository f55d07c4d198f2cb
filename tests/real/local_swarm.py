"""`noloco swarm` as tests start it."""

from __future__ import annotations

import sys
from pathlib import Path


def swarm_command(directory: Path, *arguments: str) -> list[str]:
    """All that it keeps lies in `directory`."""
    places = ("--state-dir", str(directory / "run"), "--summary", str(directory / "summary.json"))
    return [sys.executable, "-m", "bootstrap.tools_cli", "swarm", *places, *arguments]
