"""Which tests are the gate, `make test`, and what keeps it from a real clock.

One question decides: may a test look at a real clock, a real process or the memory of this one? No: it is in the
gate, and a busy machine makes it slower, never red. Yes: it lies in one of `REAL_FOLDERS` and runs in `make
test-long`, but for the few of `REAL_IN_GATE`, which show that the real thing works at all and wait for it with
`tests.patience`.
"""

from __future__ import annotations

import ast

REAL_FOLDERS = ("real", "attacks", "journeys")

REAL_IN_GATE = (
    "tests/real/test_libp2p_transport.py::TestOnUvloop::test_a_stream_carries_bytes_both_ways",
    "tests/real/test_libp2p_transport.py::TestOnUvloop::test_connect_returns_who_answered",
    "tests/real/test_libp2p_transport.py::TestOnUvloop::test_records_are_found_by_all_and_sorted",
    "tests/real/test_p2pd_process.py::test_a_taken_port_is_named",
    "tests/real/test_p2pd_process.py::test_closing_leaves_neither_a_process_nor_a_socket",
    "tests/real/test_p2pd_watchdog.py::test_a_dialler_comes_back_with_streams_and_records",
    "tests/attacks/test_dht.py::test_nested_values_are_refused",
    "tests/real/test_local_swarm.py::test_a_short_swarm_trains_and_exports",
)

FORBIDDEN_MODULES = {
    "subprocess": "starts processes",
    "multiprocessing": "starts processes",
    "pty": "starts processes",
    "psutil": "looks at processes and memory",
    "tracemalloc": "looks at memory",
    "uvloop": "runs in real time",
}
FORBIDDEN_CALLS = {
    "time.monotonic": "reads a real clock",
    "time.monotonic_ns": "reads a real clock",
    "time.perf_counter": "reads a real clock",
    "time.perf_counter_ns": "reads a real clock",
    "time.process_time": "reads a real clock",
    "time.thread_time": "reads a real clock",
    "time.sleep": "sleeps in real time",
    "resource.getrusage": "looks at processes and memory",
    "os.fork": "starts processes",
    "os.kill": "looks at processes and memory",
    "os.system": "starts processes",
    "asyncio.run": "runs in real time: make the test a coroutine, or use run_virtual",
    "asyncio.new_event_loop": "runs in real time",
    "asyncio.create_subprocess_exec": "starts processes",
    "asyncio.create_subprocess_shell": "starts processes",
}
FORBIDDEN_ATTRIBUTES = {
    "rss": "looks at processes and memory",
    "memory_info": "looks at processes and memory",
}


def clocks_in(source: str) -> list[tuple[int, str]]:
    """(line, what it does and why not) of everything in a module of tests that the gate must not do."""
    found: list[tuple[int, str]] = []
    names: dict[str, str] = {}  # as which what was imported is known
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        else:
            continue
        found += [
            (node.lineno, f"{name} {FORBIDDEN_MODULES[name]}")
            for name in modules
            if name in FORBIDDEN_MODULES
        ]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name in FORBIDDEN_CALLS:
                found.append((node.lineno, f"{name} {FORBIDDEN_CALLS[name]}"))
            elif node.attr in FORBIDDEN_ATTRIBUTES:
                found.append((node.lineno, f"{name} {FORBIDDEN_ATTRIBUTES[node.attr]}"))
        elif isinstance(node, ast.Name) and (name := names.get(node.id, "")) in FORBIDDEN_CALLS:
            found.append((node.lineno, f"{name} {FORBIDDEN_CALLS[name]}"))
    return sorted(found)
