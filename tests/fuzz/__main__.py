"""python -m tests.fuzz [MINUTES]: new examples until the time is over; with atheris, guided by what they reach.

What fails is kept in build/fuzz, as hypothesis's database or as the bytes themselves, and ends the command.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType

from hypothesis import HealthCheck, given, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.fuzz.answers import Answered, answers, takes
from tests.fuzz.decoders import CORPUS, DECODERS, corpus_of, survives
from tests.fuzz.mutations import damaged
from tests.fuzz.sessions import Step, play, sessions

MINUTES = 10.0
BUILD = Path("build") / "fuzz"
AT_A_TIME = 200  # examples between two looks at the clock
SESSIONS_SHARE = 0.3  # of the time, and as much for answers
KERNELS = "protocol.codecs.kernels"  # compiled by numba, which knows no counters
GROWN = 1 << 14  # bytes of an example at most


def with_hypothesis(name: str, until: float) -> int:
    """How many examples of a decoder, of sessions or of answers were tried."""
    test: Callable[[], None]
    rules = settings(
        max_examples=AT_A_TIME,
        deadline=None,
        database=DirectoryBasedExampleDatabase(BUILD / "hypothesis"),
        suppress_health_check=list(HealthCheck),
        derandomize=False,
    )

    def session_is_survived(session: list[Step]) -> None:
        assert play(session) == []

    def bytes_are_survived(raw: bytes) -> None:
        assert survives(name, raw)

    def answer_is_survived(answered: Answered) -> None:
        takes(answered)

    if name == "answer":
        test = rules(given(answered=answers())(answer_is_survived))
    elif name == "session":
        test = rules(given(session=sessions)(session_is_survived))
    else:
        test = rules(given(raw=damaged(corpus_of(name)))(bytes_are_survived))
    tried = 0
    while tried == 0 or time.monotonic() < until:
        test()
        tried += AT_A_TIME
    return tried


def with_atheris(name: str, seconds: float) -> None:
    """Ends the process."""
    import atheris

    found = BUILD / name
    found.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={max(1, round(seconds))}",
        f"-max_len={GROWN}",
        f"-artifact_prefix={found}/bad-",
    ]
    arguments = ["fuzz", *options, "-verbosity=0", str(found), str(CORPUS / name)]
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and _is_ours(str(function.__module__)):
            atheris.instrument_func(function)
    atheris.Setup(arguments, lambda raw: survives(name, raw))
    atheris.Fuzz()


def _is_ours(module: str) -> bool:
    return module.startswith(("protocol.", "node.")) and module != KERNELS


def main(minutes: float) -> None:
    has_atheris = find_spec("atheris") is not None
    began, each = time.monotonic(), minutes * 60 * (1 - 2 * SESSIONS_SHARE) / len(DECODERS)
    for number, name in enumerate(DECODERS, 1):
        if has_atheris:
            alone = [sys.executable, "-W", "ignore", "-m", "tests.fuzz", str(each / 120), name]
            if subprocess.run(alone, check=False).returncode:
                sys.exit(f"{name}: atheris found something, kept in {BUILD / name}")
        print(f"{name}: {with_hypothesis(name, began + number * each)} examples of hypothesis", flush=True)
    tried = with_hypothesis("answer", began + minutes * 60 * (1 - SESSIONS_SHARE))
    print(f"answers: {tried}", flush=True)
    tried = with_hypothesis("session", began + minutes * 60)
    print(
        f"sessions: {tried}. Nothing but errors of ours{'' if has_atheris else '; atheris is not installed'}."
    )


if __name__ == "__main__":
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else MINUTES
    if len(sys.argv) > 2:
        with_atheris(sys.argv[2], minutes * 60)
    main(minutes)
