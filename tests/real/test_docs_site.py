"""The docs as a site, by the program that makes it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def test_the_pages_make_a_site_without_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    """Strict: pages that the navigation lacks fail as well. What is shown comes from no other server."""
    pytest.importorskip("mkdocs", reason="pip install '.[docs]'")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "site" / "limits.html").read_text(encoding="utf-8")
    assert "--max-upload" in page
    assert (
        re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"?https?://", page.replace("rel=canonical", ""))
        == []
    )
