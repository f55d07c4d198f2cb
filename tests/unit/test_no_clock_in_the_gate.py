"""A busy machine makes the gate slower, never red: nothing in it looks at a clock, a process or memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clock_rules import REAL_FOLDERS, REAL_IN_GATE, clocks_in
from tests.grouping import group_of

TESTS = Path(__file__).parents[1]
GATE = [path for path in sorted(TESTS.rglob("*.py")) if path.relative_to(TESTS).parts[0] not in REAL_FOLDERS]
ONLY_A_COMMAND = TESTS / "fuzz" / "__main__.py"  # make fuzz: it runs for as long as it is told to


@pytest.mark.parametrize("file", GATE, ids=lambda path: str(path.relative_to(TESTS)))
def test_a_file_of_the_gate_looks_at_nothing_real(file: Path) -> None:
    found = [] if file == ONLY_A_COMMAND else clocks_in(file.read_text(encoding="utf-8"))
    assert not found, f"move it to tests/real, or use the virtual clock: {found}"


@pytest.mark.parametrize("test", REAL_IN_GATE)
def test_the_few_real_ones_in_the_gate_exist(test: str) -> None:
    file, *_, name = test.split("::")
    sources = [TESTS.parent / file, *TESTS.glob("transport_*.py")]
    assert any(f"def {name}(" in source.read_text(encoding="utf-8") for source in sources)
    assert "perf_counter" not in (TESTS.parent / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import time\ntime.sleep(1)", "time.sleep sleeps in real time"),
        ("from time import sleep as nap\nnap(1)", "time.sleep sleeps in real time"),
        ("import time\nbegan = time.perf_counter()", "time.perf_counter reads a real clock"),
        ("from time import monotonic\nclock = monotonic", "time.monotonic reads a real clock"),
        ("memory = process.memory_info().rss", "process.memory_info looks at processes and memory"),
        ("import subprocess", "subprocess starts processes"),
        ("from subprocess import run", "subprocess starts processes"),
        ("import asyncio\nasyncio.run(main())", "asyncio.run runs in real time"),
    ],
)
def test_what_looks_at_something_real_is_found(source: str, what: str) -> None:
    assert any(said.startswith(what) for _, said in clocks_in(source))


@pytest.mark.parametrize(
    "test", [*REAL_IN_GATE, "tests/attacks/test_dht.py::test_nested_values_are_refused[10]"]
)
def test_those_in_real_time_are_one_group_and_no_other_is(test: str) -> None:
    assert group_of(test) == "real"
    assert group_of("tests/unit/test_real.py::test_real[tests/real/]") != "real"


def test_what_the_virtual_clock_does_is_not() -> None:
    assert clocks_in("import asyncio\nawait asyncio.sleep(1)\nrun_virtual(main())\nloop.time()") == []
