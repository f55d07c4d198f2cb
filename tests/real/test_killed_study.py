"""A benchmark that runs several things at a time takes down with it what they have started."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from reporting import report

STUDY = f"""
import subprocess, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
sys.path.insert(0, {str(Path(report.__file__).parents[1])!r})
from reporting.report import run

def work(number):
    subprocess.Popen([sys.executable, "-S", "-c", "import time; print('begun', flush=True); time.sleep(600)"]).wait()

def main():
    list(ProcessPoolExecutor(2, mp_context=get_context("spawn")).map(work, range(3)))

if __name__ == "__main__":
    run(main)
"""


@pytest.mark.timeout(60)
def test_what_a_killed_study_has_started_ends_with_it(tmp_path: Path) -> None:
    script = tmp_path / "study.py"
    script.write_text(STUDY)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as study:
        assert study.stdout is not None
        assert [study.stdout.readline(), study.stdout.readline()] == ["begun\n", "begun\n"]
        family = psutil.Process(study.pid).children(recursive=True)
        study.terminate()
        assert study.wait(30) == 128 + signal.SIGTERM
        gone, alive = psutil.wait_procs(family, 10)
        assert not alive
        assert len(gone) >= 4  # two workers, and what each has started
