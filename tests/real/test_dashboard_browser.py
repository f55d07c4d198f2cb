"""The dashboard in a browser: of real nodes, of a thousand made-up ones, of a run that is over.

With NOLOCO_PICTURES=docs the pictures of docs/ are made anew.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.real.browsers import DARK, DESKTOP, PHONE, Browser, Seen, browser
from tests.real.daemons import Daemon, NodeDaemon, SeedDaemon, wait_until

pytestmark = pytest.mark.timeout(600)

INTERACTIVE_SECONDS = 2.0
TRIES = 4
KILLED_SECONDS = 15.0
LIVE_SECONDS = 2.0
TEXT_SECONDS = 120.0
PATIENCE = 240.0
NICE = ("nice", "-n", "10")  # training leaves the browser room
HERE = "127.0.0.1"
ADDRESS = r"http://127\.0\.0\.1:\d+/"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@contextmanager
def made_up(members: int, stages: int, port: int = 0) -> Iterator[tuple[Any, str]]:
    """(process, address) of a dashboard; a line to the process kills one member of the second stage."""
    numbers = map(str, (members, stages, port))
    command = [sys.executable, str(Path(__file__).parent / "made_up_dashboard.py"), *numbers]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert re.fullmatch(ADDRESS, address), address
            yield process, address
        finally:
            process.kill()


@pytest.fixture(scope="module")
def thousand() -> Iterator[tuple[Any, str]]:
    with made_up(1_000, 6) as found:
        yield found


@pytest.fixture(scope="module")
def nine() -> Iterator[str]:
    with made_up(9, 3) as (_, address):
        yield address


def assert_well_behaved(seen: Seen) -> None:
    assert seen.complaints == []
    assert seen.hosts == {HERE}


def opened_soon(chromium: Browser, address: str, **settings: Any) -> Seen:
    """A page that could be used soon; other tests may hold the machine up once or twice."""
    for _ in range(TRIES):
        seen = chromium.open(address, **settings)
        if seen.seconds < INTERACTIVE_SECONDS:
            return seen
        seen.page.close()
    raise AssertionError(f"{seen.seconds:.1f} s until the page could be used")


def text_of(seen: Seen, selector: str) -> str:
    return str(seen.page.inner_text(selector))


def waits(condition: Callable[[], bool], seconds: float) -> float:
    """For how long; fails after `seconds`."""
    began = time.monotonic()
    assert wait_until(condition, seconds, lambda: True), f"not within {seconds} s"
    return time.monotonic() - began


def longest_pause(seen: Seen, selector: str, changes: int) -> float:
    """Seconds between two changes of what the page shows there, at most."""
    script = """([selector, changes]) => new Promise((done) => {
        let last = performance.now(), longest = 0, count = -1;
        new MutationObserver(() => {
            const now = performance.now();
            if (++count) longest = Math.max(longest, now - last);
            last = now;
            if (count >= changes) done(longest / 1000);
        }).observe(document.querySelector(selector), { subtree: true, childList: true, characterData: true });
    })"""
    return float(seen.page.evaluate(script, [selector, changes]))


def test_six_real_nodes_two_browsers_a_killed_node_and_the_replay(chromium: Browser, tmp_path: Path) -> None:
    seed = SeedDaemon(tmp_path / "run", "--preset", "tiny", "--dashboard", f"{HERE}:0")
    address = seed.wait_for(rf"Dashboard of run 'tiny': ({ADDRESS})", PATIENCE)[1]
    nodes = [
        NodeDaemon(
            tmp_path / f"n{i}",
            "--join",
            seed.join_address(),
            "--stage",
            str(i % 2),
            "--max-minutes",
            "8",
            prefix=NICE,
        )
        for i in range(6)
    ]
    for node in nodes:
        node.wait_for_step(20, PATIENCE)
    first, second = opened_soon(chromium, address, **DESKTOP), opened_soon(chromium, address, **PHONE)
    for seen in (first, second):
        assert "tiny" in text_of(seen, "#run")
        waits(
            lambda seen=seen: seen.page.evaluate(
                "document.querySelectorAll('#members tbody tr').length === 6"
            ),
            20.0,
        )
        assert min(longest_pause(seen, "#tiles", 6) for _ in range(TRIES)) < LIVE_SECONDS
    assert first.page.locator("#stages .flows path").count() > 0
    assert first.page.locator("#stages .pairs path").count() > 0
    waits(lambda: text_of(first, "#samples blockquote").startswith("The "), TEXT_SECONDS)
    nodes[3].kill()
    for seen in (first, second):
        waits(lambda seen=seen: "silent" in text_of(seen, "#members"), KILLED_SECONDS)
    assert first.page.locator("#stages .members .silent").count() == 1
    for seen in (first, second):
        assert_well_behaved(seen)
    for node in (node for node in nodes if node.still_running()):
        node.signal(signal.SIGINT)
    for node in nodes:
        node.process.wait(60)
    replayed(chromium, tmp_path)


def replayed(chromium: Browser, directory: Path) -> None:
    command = [sys.executable, "-m", "bootstrap.tools_cli", "dashboard", "--listen", f"{HERE}:0"]
    daemon = Daemon([*command, "--replay", str(directory)], directory / "replay.log")
    seen = chromium.open(daemon.wait_for(ADDRESS)[0], **DESKTOP)
    assert text_of(seen, "#connection") == "replay"
    at_the_end = text_of(seen, "#tiles")
    slider = seen.page.locator("#when")
    slider.focus()
    slider.press("Home")
    waits(lambda: text_of(seen, "#tiles") != at_the_end, 5.0)
    assert "before the end" in text_of(seen, "#moment")
    seen.page.click("#play")
    waits(lambda: seen.page.evaluate("Number(document.querySelector('#when').value) > 30"), 20.0)
    seen.page.click("#now")
    waits(lambda: text_of(seen, "#tiles") == at_the_end, 5.0)
    assert_well_behaved(seen)
    assert daemon.leave() == 0


def test_a_thousand_members(chromium: Browser, thousand: tuple[Any, str]) -> None:
    process, address = thousand
    seen = opened_soon(chromium, address, **DESKTOP)
    assert seen.page.locator("#stages .members > g").count() == 1_000
    assert min(longest_pause(seen, "#tiles", 6) for _ in range(TRIES)) < LIVE_SECONDS
    process.stdin.write("\n")
    process.stdin.flush()
    waits(lambda: seen.page.locator("#stages .members .silent").count() == 1, KILLED_SECONDS)
    assert "1 silent" in text_of(seen, "#tiles")
    seen.page.fill("#find", "silent")
    waits(lambda: seen.page.locator("#members tbody tr").count() == 1, 2.0)
    assert_well_behaved(seen)


def test_texts_and_names_are_shown_as_text_and_never_as_markup(chromium: Browser, nine: str) -> None:
    seen = chromium.open(nine, **DESKTOP)
    waits(lambda: "<i>values</i>" in text_of(seen, "#samples"), 10.0)
    assert "step 3,000, round 60, loss " in text_of(seen, "#samples")
    assert "<b>ada<" in text_of(seen, "#given")
    assert seen.page.locator("#samples i, #given b").count() == 0
    assert_well_behaved(seen)


def test_a_reader_types_a_prompt_and_sees_the_text_and_the_next_one_has_to_wait(chromium: Browser) -> None:
    with made_up(6, 2) as (_, address):
        seen = chromium.open(address, **PHONE)
        page: Any = seen.page
        page.fill("#prompt", "Once & <b>again</b>")
        page.press("#prompt", "Enter")
        waits(lambda: "Once & <b>again</b> <u>so</u>" in text_of(seen, "#samples"), 10.0)
        assert seen.page.locator("#samples b, #samples u").count() == 0
        page.click("#ask button")
        waits(lambda: "try again in" in text_of(seen, "#ask-note"), 10.0)
        assert not page.locator("#orders").is_visible()
        assert seen.hosts == {HERE}


def test_two_of_one_name_are_told_apart_and_keys_are_behind_the_names(chromium: Browser, nine: str) -> None:
    seen = chromium.open(nine, **DESKTOP)
    waits(lambda: seen.page.locator("#members tbody tr").count() == 9, 20.0)
    for place in ("#members tbody th", "#links tbody th"):
        waits(lambda place=place: seen.page.locator(place).count() == 9, 20.0)
        shown = [seen.page.locator(place).nth(i).inner_text() for i in range(9)]
        assert len(set(shown)) == 9
        assert sum(name.startswith("<b>ada<…") for name in shown) == 2
        assert "s1r0" in shown
    title = str(seen.page.locator("#members tbody button").first.get_attribute("title"))
    assert title.startswith("12D3Koo")
    assert "12D3Koo" not in text_of(seen, "#main").replace(text_of(seen, "#join"), "")
    seen.page.fill("#find", "S1R2")
    waits(lambda: seen.page.locator("#members tbody tr").count() == 1, 5.0)


def test_a_first_look_finds_what_it_is_how_to_join_and_how_long_it_takes(
    chromium: Browser, nine: str
) -> None:
    seen = chromium.open(nine, **DESKTOP)
    waits(lambda: seen.page.locator("#members tbody tr").count() == 9, 20.0)
    page: Any = seen.page
    cards = page.locator(".card:visible")
    assert cards.count() == 11
    for number in range(cards.count()):
        sentence = cards.nth(number).locator("p.quiet:not([role=status])").first.inner_text()
        assert sentence.endswith("."), cards.nth(number).inner_text()
    assert text_of(seen, "#join").startswith("noloco join /dns4/seed.example/tcp/1/p2p/12D3Koo")
    assert "from everywhere" in text_of(seen, "#join-note")
    page.click("#copy")
    waits(lambda: text_of(seen, "#copy") != "Copy", 5.0)
    tiles = text_of(seen, "#tiles")
    assert "Time left" in tiles
    assert "Held-out loss\n2.400" in tiles
    waits(lambda: "bigram of that text, 2.450" in text_of(seen, "#charts"), 5.0)
    assert re.search(r"seen since \d\d:\d\d", text_of(seen, "#remarks"))
    assert "1.2 M, 100 %" in text_of(seen, "#given").replace("1.20 M", "1.2 M")
    assert_well_behaved(seen)


def test_it_goes_on_with_a_server_that_was_started_again(chromium: Browser) -> None:
    """Old figures are marked as such meanwhile, and none of them stays."""
    with made_up(9, 3) as (_, address):
        seen = chromium.open(address, **DESKTOP)
        waits(lambda: seen.page.locator("#members tbody tr").count() == 9, 20.0)
    waits(lambda: "connection lost: what is shown is of " in text_of(seen, "#connection"), 10.0)
    assert seen.page.evaluate("Number(getComputedStyle(document.querySelector('main')).opacity)") < 1
    with made_up(4, 2, int(address.rstrip("/").rpartition(":")[2])):
        waits(lambda: text_of(seen, "#connection") == "live", 30.0)
        waits(lambda: seen.page.locator("#members tbody tr").count() == 4, 20.0)
        assert seen.page.evaluate("Number(getComputedStyle(document.querySelector('main')).opacity)") == 1
    assert seen.hosts == {HERE}


def test_the_keyboard_reaches_everything(chromium: Browser, nine: str) -> None:
    seen = chromium.open(nine, **DESKTOP)
    page: Any = seen.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    chart = page.locator("figure svg").first
    waits(
        lambda: page.evaluate("document.querySelector('figure svg').getAttribute('aria-valuemax') > 3"), 20.0
    )
    chart.focus()
    chart.press("Home")
    at_first = chart.get_attribute("aria-valuetext")
    chart.press("ArrowRight")
    assert chart.get_attribute("aria-valuetext") != at_first
    assert page.locator(".tip").first.is_visible()
    page.locator("#members tbody button").first.press("Enter")
    assert "sends microbatches to" in text_of(seen, "#chosen")
    assert page.locator("#stages .chosen").count() == 1
    page.locator("input[name=across][value=tokens]").press("Space")
    assert_well_behaved(seen)


@pytest.mark.parametrize(("kind", "settings"), [("desktop", DESKTOP), ("phone", PHONE), ("dark", DARK)])
def test_axe_finds_nothing_and_a_picture(
    chromium: Browser, nine: str, tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="pip install 'noloco-node[browser]'"
    )
    seen = chromium.open(nine, **settings)
    page: Any = seen.page
    waits(lambda: page.evaluate("document.querySelectorAll('#links td').length > 9"), 20.0)
    page.wait_for_timeout(1_000)
    # the policy forbids foreign scripts, axe among them, except from the debugger
    found = axe.Axe().run(page).response["violations"]
    assert [f"{f['impact']} {f['id']}: {f['nodes'][0]['target']}" for f in found] == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "it scrolls sideways"
    directory = Path(os.environ.get("NOLOCO_PICTURES", tmp_path))
    picture = directory / f"dashboard-{kind}.png"
    if kind != "phone":
        page.set_viewport_size({"width": 1280, "height": 1480})  # as far as the curves
        page.wait_for_timeout(500)
    page.screenshot(path=picture, scale="css")
    assert picture.stat().st_size > 20_000
    assert seen.hosts == {HERE}
