"""What the process frees stays with it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from node.data.documents import Split, stored_documents


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


def peak_while_stored(folder: Path, documents: int, nbytes: int) -> int:
    """Most memory in use at a time while so many documents of so many bytes each are put into a store."""
    folder.mkdir()
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(documents):
            file.write(json.dumps({"text": f"{number} ".ljust(nbytes, "x")}) + "\n")
    tracemalloc.start()
    try:
        stored_documents([str(folder / "rows.jsonl")], "text", 16_384, Split(0.05), folder / "cache")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_store_is_made_in_60_bytes_a_document_whatever_they_hold(tmp_path: Path) -> None:
    """Beside some blocks of a file."""
    few = peak_while_stored(tmp_path / "few", 100, 1_000)
    long = peak_while_stored(tmp_path / "long", 1_500, 16_000)
    assert long - few < 2 << 20, "24 MB of text are not held"
    many = peak_while_stored(tmp_path / "many", 60_000, 20)
    assert many - few < 60 * 60_000
