"""The command noloco export, where it cannot work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_an_export_without_an_address_makes_no_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bootstrap.tools_cli", "export", "--out", str(tmp_path / "a" / "model")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "--join" in done.stderr
    assert not (tmp_path / "a").exists()
