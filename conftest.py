"""The test suite as a whole: its options, what belongs to the gate, and whom garbage is charged to.

These hooks must live at the root of the repository for pytest to see them in time.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import settings

from bootstrap.lab.in_memory.virtual_time import VirtualTimeLoop
from tests.clock_rules import REAL_FOLDERS, REAL_IN_GATE
from tests.real import daemons

TESTS = Path(__file__).parent / "tests"
MARK = "TEST_SUITE_RUN"  # in the environment of every process that this run of the suite starts
os.environ.setdefault(MARK, uuid.uuid4().hex)
REAL_TIME = Path(
    tempfile.gettempdir(), f"tests-in-real-time-{os.environ[MARK]}"
)  # locked by the one that runs
# What destructors say of files, tasks and coroutines that nobody closed or awaited. Under the virtual clock all of
# these are ours, and the collector runs after each test; in real time it may run late, in another test's time.
LATE = (":pytest.PytestUnraisableExceptionWarning", ":ResourceWarning", ".*was never awaited:RuntimeWarning")
# For `make coverage`: what lines are reached a few examples tell, and traced they take ten times as long
settings.register_profile("few", settings.get_profile("ci"), max_examples=5)
torch.set_num_threads(1)  # here, so that it does not depend on which modules of tests are imported first


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="also check the outer step against the cases of this golden file; may be repeated",
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """What is long.

    A test that may look at a real clock, a process or memory is long, but for `REAL_IN_GATE`; of a test marked
    `long_but(id, ...)`, all cases but these are.
    """
    if not _is_real(item):
        for warning in LATE:
            item.add_marker(pytest.mark.filterwarnings(f"error:{warning}"))
    elif item.nodeid.partition("[")[0] not in REAL_IN_GATE:
        item.add_marker(pytest.mark.long)
    marked = item.get_closest_marker("long_but")
    if marked and isinstance(item, pytest.Function) and item.callspec.id not in marked.args:
        item.add_marker(pytest.mark.long)
    if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
        item.add_marker(pytest.mark.timeout(900))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.grouping import RealOnesTogether  # which needs xdist: this is called where there is one

    return RealOnesTogether(config, log)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Outside of the folders for real time, a coroutine that is a test runs under the virtual clock."""
    if _is_real(item):
        return {"real": asyncio.new_event_loop}
    return {"virtual": VirtualTimeLoop}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`long_but` names cases by their ids: one that is changed must not leave the gate in silence."""
    if any("::" in argument for argument in config.args):
        return
    ids: dict[str, set[str]] = {}
    named: dict[str, set[str]] = {}
    for item in items:
        if (marked := item.get_closest_marker("long_but")) and isinstance(item, pytest.Function):
            name = item.nodeid.partition("[")[0]
            ids.setdefault(name, set()).add(item.callspec.id)
            named.setdefault(name, set()).update(marked.args)
    lost = {name: sorted(named[name] - ids[name]) for name in ids if named[name] - ids[name]}
    if lost:
        raise pytest.UsageError(f"long_but names cases that are not there: {lost}")


def _is_real(item: pytest.Item) -> bool:
    """In a folder for real time, or not in tests/ at all, as that of the image."""
    return not item.path.is_relative_to(TESTS) or item.path.relative_to(TESTS).parts[0] in REAL_FOLDERS


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _garbage_is_charged_to_who_made_it() -> Iterator[None]:
    """What is alive after a test stays out of later collections, which so take a millisecond and not a hundred."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _daemons_end_with_their_test() -> Iterator[None]:
    """A test that fails, in whatever folder, leaves no daemon behind to disturb those after it."""
    before = len(daemons.started)
    yield
    for pid in daemons.started[before:]:
        daemons.end(pid)
    del daemons.started[before:]


@pytest.fixture(autouse=True)
def _real_ones_are_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether those in real time run one after another, however the processes of tests share them out."""
    if not _is_real(request.node):
        yield
        return
    with REAL_TIME.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pytest.fail(
                "Another test in real time runs at the same time: tests/grouping.py keeps them apart."
            )
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which processes the tests left behind, and end them: they would disturb whatever runs next.

    Not at the end of one of several processes of tests: those of the others are still at work.
    """
    if hasattr(config, "workerinput"):
        return
    REAL_TIME.unlink(missing_ok=True)
    left = [process for process in psutil.process_iter() if _is_of_this_run(process)]
    for process in left:
        with suppress(psutil.Error):
            terminalreporter.write_line(
                f"Left behind: {process.pid} {' '.join(process.cmdline())[:200]}", red=True
            )
            process.kill()


def _is_of_this_run(process: psutil.Process) -> bool:
    own = {os.getpid(), os.getppid()}
    with suppress(psutil.Error, OSError):
        started_by_tests = process.environ().get(MARK) == os.environ[MARK]
        return started_by_tests and not own & {process.pid, process.ppid()} and process.status() != "zombie"
    return False
