"""A process that ends at once leaves no lock of a library behind, of which Python would complain."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import multiprocessing, sys, typer
multiprocessing.set_start_method("forkserver")  # the default from Python 3.14 on
from node.command import App
from node.machine.processes import end_process
app = App()
@app.command()
def node() -> None:
    import hivemind
    print("imported")
    end_process()
if {ours}:
    app(args=[])
else:
    node()
"""


@pytest.mark.parametrize("ours", [True, False], ids=["our application", "a plain function"])
def test_no_lock_is_leaked(ours: bool) -> None:
    """The second case shows that the first would notice."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(ours=ours)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "imported" in ended.stdout
    assert ("leaked semaphore" in ended.stderr) is not ours, ended.stderr
