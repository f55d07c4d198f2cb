"""What the process frees stays with it."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator is what is set")
def test_freed_memory_is_not_taken_from_the_system_again() -> None:
    """In a process of its own: the setting is the process's."""
    program = (
        "import resource, torch\n"
        "from node.machine.limits import keep_freed_memory\n"
        "keep_freed_memory()\n"
        "def use(): return [torch.ones(2**18) for _ in range(50)]\n"
        "use()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(5): use()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    pages_used = 5 * 50 * 2**20 // resource.getpagesize()
    assert int(done.stdout) < pages_used / 10
