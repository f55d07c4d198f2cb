"""What every benchmark has in common: its options, what it tells people and programs, and how it ends."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

TERMINATED = 128 + signal.SIGTERM  # as a shell tells it


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring, with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print ratios and results as one line of JSON")
    parser.add_argument(
        "--tiny", action="store_true", help="so little that it tells whether this runs, no more"
    )
    return parser


def arguments_of(parser: argparse.ArgumentParser, **tiny: Any) -> argparse.Namespace:
    """What the command line says; `tiny` are the values that `--tiny` gives to options that it does not name."""
    if "--tiny" in sys.argv[1:]:
        parser.set_defaults(**tiny)
    return parser.parse_args()


class Report:
    """People are told as it goes, on stderr when the result is for a program."""

    def __init__(self, benchmark: str, as_json: bool) -> None:
        self._benchmark = benchmark
        self._as_json = as_json

    def tell(self, text: str) -> None:
        print(text, file=sys.stderr if self._as_json else sys.stdout, flush=True)

    def tell_row(self, row: Mapping[str, Any]) -> None:
        self.tell("   ".join(f"{name.replace('_', ' ')} {value}" for name, value in row.items()))

    def conclude(self, ratios: Mapping[str, float], results: Sequence[Any], note: str = "") -> None:
        """The ratios, each with `note` after it, or all as JSON. Whoever asks rounds them."""
        if self._as_json:
            print(json.dumps({"benchmark": self._benchmark, "ratios": ratios, "results": results}))
            return
        for name, value in ratios.items():
            print(f"{name}: {value:g}{f' ({note})' if note else ''}")


def run(main: Callable[[], None], *failures: type[Exception]) -> None:
    """One of `failures` ends it with the text of that. When it is killed, its children are taken down too."""
    signal.signal(signal.SIGTERM, _end)
    try:
        main()
    except failures as error:
        sys.exit(f"error: {error}")


def _end(*_: object) -> None:
    """Leave through all `with` and `finally`; a study at once, for it would wait there for the runs under way.

    Of those nothing goes on: with its workers end the processes that they have started.
    """
    workers = multiprocessing.active_children()
    started = [process for worker in workers for process in _started_by(worker.pid)]
    for worker in workers:
        worker.kill()
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if workers:
        os._exit(TERMINATED)
    sys.exit(TERMINATED)


def _started_by(pid: int | None) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
