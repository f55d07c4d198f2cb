"""Headless Chromium for tests: what a page says on its console, what it asks for, how soon it is there."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
DESKTOP = {"viewport": {"width": 1280, "height": 900}}
PHONE = {
    "viewport": {"width": 390, "height": 844},
    "device_scale_factor": 2,
    "is_mobile": True,
    "has_touch": True,
}
DARK = DESKTOP | {"color_scheme": "dark"}


@dataclass
class Seen:
    """One page. Mutable: what it complained of, and the hosts that it asked."""

    page: Any  # Playwright's, which may be missing
    complaints: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    seconds: float = 0.0  # until it could be used


class Browser:
    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium

    def open(self, url: str, **settings: object) -> Seen:
        """Open a page in a browser profile of its own, and wait until it can be used."""
        page = self._chromium.new_context(**settings).new_page()
        seen = Seen(page)
        page.on(
            "console", lambda m: seen.complaints.append(m.text) if m.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        page.on("request", lambda request: seen.hosts.add(urlsplit(request.url).hostname or request.url))
        began = time.monotonic()
        page.goto(url)
        page.wait_for_selector("body[data-ready]")
        seen.seconds = time.monotonic() - began
        return seen


@contextmanager
def browser() -> Iterator[Browser]:
    """Skips the test where there is no Chromium, or no Playwright to drive it."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install 'noloco-node[browser]'")
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield Browser(chromium)
        finally:
            chromium.close()
