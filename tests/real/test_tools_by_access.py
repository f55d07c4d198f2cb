"""Every tool that looks at a run, under every way to be let in: it works, or ends with one true sentence and a code.

One private and one open run serve all rows. Each tool is typed as a person types it, in a process that is forked from
one in which the libraries are loaded, and a few at once: so the table ends within minutes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest

from bootstrap.creating.inviting import Issuer
from protocol.errors import DONE, LATER, MEND, NO
from tests.patience import patience
from tests.real import daemons
from tests.real.daemons import NodeDaemon, SeedDaemon, wait_until
from tests.real.test_private_run import MANIFEST

LOADED = [
    __name__,
    "bootstrap.creating.inviting",
    "bootstrap.dashboard.running", "bootstrap.dashboard.watching", "bootstrap.evaluation.measuring",
    "bootstrap.export.exporting", "bootstrap.generation.writing", "bootstrap.inspect.contributors",
    "bootstrap.inspect.diagnosing", "bootstrap.inspect.doctor", "bootstrap.inspect.link_map",
    "bootstrap.inspect.status", "bootstrap.lab.placement.plan_run", "bootstrap.tools_cli",
]  # fmt: skip
AT_ONCE = 4  # of the visitors that a token lets in at a time: `protocol.access.admission.LEAST_VISITORS`
_context = multiprocessing.get_context("forkserver")

TOOLS: dict[str, tuple[str, ...]] = {
    "status": ("status",),
    "watch": ("watch", "--events", "curve.jsonl", "--seconds", "1"),
    "dashboard": ("dashboard", "--listen", "127.0.0.1:0"),
    "contributors": ("contributors",),
    "doctor": ("doctor", "--port", "0", "--host", "127.0.0.1"),
    "diagnose": ("diagnose",),
    "links": ("links",),
    "eval": ("eval", "--data", "text.txt", "--sequences", "2"),
    "export": ("export", "--out", "model"),
    "generate": ("generate", "Once", "--tokens", "3"),
    "plan": ("plan", "--seconds", "0.1"),
}
ENDLESS = ("watch", "dashboard")  # until Ctrl-C
# In a run of one node there is nothing to place: that is the answer, and comes after the members let the tool in
ALONE = "1 nodes cannot fill 1 stages: wait until more have joined."
NOBODY = "nobody trains"


@dataclass(frozen=True)
class Ended:
    """The end of a command: its exit code and what it wrote."""

    code: int
    out: str
    err: str
    metrics: str = ""

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"

    @property
    def sentence(self) -> str:
        """What it ended with, in one line."""
        return " ".join(self.err.partition("error: ")[2].split())


def _run_command(folder: Path, arguments: tuple[str, ...], variables: dict[str, str]) -> None:
    """Run in a process of its own: `noloco …` with its output in files of the folder, named after the command."""
    os.chdir(folder)
    for name in [name for name in os.environ if name.startswith("NOLOCO_")]:
        del os.environ[name]
    os.environ.update(variables)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{arguments[0]}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["noloco", *arguments]
    from bootstrap.tools_cli import main

    main()


def command(folder: Path, *arguments: str, **variables: str) -> Ended:
    """`noloco …`, typed in a folder, to its end; an endless one until it has shown something of the run."""
    (folder / f"{arguments[0]}.out").unlink(missing_ok=True)
    process = _context.Process(target=_run_command, args=(folder, arguments, variables))
    process.start()
    assert process.pid is not None
    daemons.started.append(process.pid)
    metrics = ""
    if arguments[0] in ENDLESS:
        metrics = _shown(folder, arguments[0], process.is_alive)
        if process.is_alive():
            os.kill(process.pid, signal.SIGINT)
    process.join(patience(180.0))
    assert process.exitcode is not None, f"{arguments} still runs"
    out, err = ((folder / f"{arguments[0]}.{name}").read_text(errors="replace") for name in ("out", "err"))
    return Ended(process.exitcode, out, err, metrics)


def every_tool(folder: Path, *more: str, **variables: str) -> dict[str, Ended]:
    """Type every tool in the folder, `AT_ONCE` of them at a time."""
    _clear(folder)

    def ended(name: str) -> Ended:
        return command(folder, *TOOLS[name], *more, **variables)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(TOOLS, pool.map(ended, TOOLS), strict=True))


def _clear(folder: Path) -> None:
    """Leave nothing of earlier tools in the folder, and a text to evaluate."""
    folder.mkdir(exist_ok=True)
    shutil.rmtree(folder / "model", ignore_errors=True)
    (folder / "curve.jsonl").unlink(missing_ok=True)
    (folder / "text.txt").write_text("Once upon a time there was a run that few could see.\n" * 4)


def _shown(folder: Path, name: str, is_running: Callable[[], bool]) -> str:
    """Wait for the first point of the curve, or for the members on the page, while the command runs."""
    curve, printed = folder / "curve.jsonl", folder / f"{name}.out"
    if name == "watch":
        wait_until(lambda: curve.exists() and curve.read_text(), patience(120.0), while_true=is_running)
        return curve.read_text() if curve.exists() else ""
    at = wait_until(
        lambda: printed.exists() and re.search(r"Dashboard of run .*: (http://\S+)", printed.read_text()),
        patience(120.0),
        while_true=is_running,
    )
    if not at:
        return ""
    return str(wait_until(lambda: _metrics(at.group(1), "peer="), patience(120.0), while_true=is_running))


def _metrics(page: str, having: str) -> str:
    """Return the page's metrics; nothing while there is no page, or no such word in them."""
    try:
        with urlopen(f"{page}metrics", timeout=20) as answer:
            text = str(answer.read().decode())
    except OSError:
        return ""
    return text if having in text else ""


@dataclass
class Runs:
    """A private and an open run, each with a seed peer and one node, and what lets into the private one."""

    folder: Path
    private: str  # addresses of the seed peers
    open: str
    node: str  # that of the node of the private run
    seed: SeedDaemon
    volunteer: NodeDaemon
    used_up: str
    unused: str
    revoked: str
    expired: str

    @property
    def founder(self) -> Path:
        return self.folder / "founder" / "noloco-run"


def _founded(place: Path, manifest: str, *arguments: str) -> SeedDaemon:
    place.mkdir(parents=True)
    (place / "run.toml").write_text(manifest, encoding="utf-8")
    return SeedDaemon(place / "noloco-run", "--manifest", str(place / "run.toml"), "--no-keep", *arguments)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder, before = tmp_path_factory.mktemp("runs"), len(daemons.started)
    multiprocessing.set_forkserver_preload(LOADED)
    try:
        page = "--dashboard", "127.0.0.1:0"
        seed = _founded(folder / "founder", MANIFEST, *page)
        other = _founded(folder / "other", MANIFEST.replace("private = true", "private = false"))
        private, open_ = seed.join_address(), other.join_address()
        at = "--state-dir", str(folder / "founder" / "noloco-run")
        typed = folder / "typed"
        typed.mkdir()
        used_up, unused, revoked = (command(typed, "invite", *at).out.strip() for _ in range(3))
        assert command(typed, "revoke", revoked, *at).code == DONE
        expired = Issuer.owner(Path(at[1])).invite(1, -1.0).to_text()
        slowly = "--gpu-percent", "20"
        volunteer = NodeDaemon(
            folder / "volunteer" / "noloco-state", "--join", private, "--token", used_up, *page, *slowly
        )
        elsewhere = NodeDaemon(folder / "other" / "noloco-state", "--join", open_, *slowly)
        for node in (volunteer, elsewhere):
            node.wait_for_step(1, patience(240.0))
        found = Runs(
            folder, private, open_, volunteer.address, seed, volunteer, used_up, unused, revoked, expired
        )
        assert wait_until(lambda: _is_refused(found, revoked))  # within a minute: docs/private.md
        yield found
    finally:
        for pid in daemons.started[before:]:
            daemons.end(pid)


def _is_refused(runs: Runs, token: str) -> bool:
    looked = command(runs.folder / "typed", "status", "--join", runs.private, "--token", token)
    return looked.code != DONE


def wrong_of(tools: dict[str, Ended], check: Callable[[str, Ended], None]) -> str:
    """Return what is wrong with each tool that does not pass the check."""
    wrong = []
    for name, ended in tools.items():
        try:
            check(name, ended)
        except AssertionError as failure:
            wrong.append(f"===== {name}: {failure}\n{ended}")
    return "\n".join(wrong)


def works(name: str, ended: Ended) -> None:
    """A tool was let in, and shows the run with its one node."""
    assert ended.code in {"doctor": (DONE, NO), "plan": (MEND,)}.get(name, (DONE,))
    assert NOBODY not in ended.out
    assert "Traceback" not in ended.err
    match name:
        case "status":
            assert ended.out.count("serving") == 1
        case "watch":
            assert '"members": 1' in ended.metrics
        case "dashboard":
            assert 'peer="12D3' in ended.metrics
        case "doctor":
            assert "They train run 'secret'" in ended.out
        case "plan":
            assert ended.sentence == ALONE
        case _:
            assert ended.out


def ends(code: int, why: str) -> Callable[[str, Ended], None]:
    """Return a check: a tool ended with one error that says why, and with nothing else."""

    def check(name: str, ended: Ended) -> None:
        assert ended.code == code
        assert ended.err.count("error: ") == 1
        assert why in ended.sentence
        assert NOBODY not in ended.out
        assert "Traceback" not in ended.err

    return check


def test_every_tool_looks_at_an_open_run(runs: Runs) -> None:
    assert not wrong_of(every_tool(runs.folder / "anybody", "--join", runs.open), works)


@pytest.mark.parametrize("token", ["unused", "used_up"])
def test_every_tool_is_let_in_with_a_token(runs: Runs, token: str) -> None:
    """Of a token that its node has used up, too: a visit is no use."""
    given = "--token", str(getattr(runs, token))
    shown = every_tool(runs.folder / token, "--join", runs.private, *given)
    assert not wrong_of(shown, works)
    assert "The members let this machine in" in shown["doctor"].out


@pytest.mark.parametrize("folder", ["volunteer", "founder"])
def test_every_tool_is_let_in_beside_a_state_and_a_run_directory(runs: Runs, folder: str) -> None:
    assert not wrong_of(every_tool(runs.folder / folder, "--join", runs.private), works)


@pytest.mark.parametrize(
    ("token", "why"),
    [
        ("revoked", "the run's owner has revoked the invitation. Ask the run's owner for another one."),
        ("expired", "the invitation has expired. Ask the run's owner for another one."),
    ],
)
def test_every_tool_says_why_it_is_not_let_in(runs: Runs, token: str, why: str) -> None:
    given = {"NOLOCO_TOKEN": str(getattr(runs, token))}
    assert not wrong_of(every_tool(runs.folder / token, "--join", runs.private, **given), ends(MEND, why))


@pytest.mark.parametrize("page_of", ["seed", "volunteer"])
def test_the_page_beside_a_daemon_shows_the_run(runs: Runs, page_of: str) -> None:
    daemon: SeedDaemon | NodeDaemon = getattr(runs, page_of)
    page = daemon.wait_for(r"Dashboard of run 'secret': (http://127\.0\.0\.1:\d+/)").group(1)
    assert wait_until(lambda: _metrics(page, 'peer="12D3')), daemon.output
    assert "give the token" not in daemon.output


@pytest.fixture(scope="module")
def without_seed(runs: Runs) -> Runs:
    runs.seed.kill()
    return runs


def test_without_the_seed_peer_a_member_lets_every_tool_in(without_seed: Runs) -> None:
    folder = without_seed.folder / "volunteer"
    assert not wrong_of(every_tool(folder, "--join", without_seed.node), works)


def test_every_tool_says_that_the_seed_peer_does_not_answer(without_seed: Runs) -> None:
    """Code 75: it may be up again later. The doctor's answer is no, and a report has the reason in it."""
    folder = without_seed.folder / "volunteer"
    tools = every_tool(folder, "--join", without_seed.private)
    doctor, diagnose = tools.pop("doctor"), tools.pop("diagnose")
    assert not wrong_of(tools, ends(LATER, "No peer answered at:"))
    assert (doctor.code, "NO  TCP" in doctor.out) == (NO, True), doctor
    written = json.loads((folder / "noloco-diagnosis.json").read_text())
    assert (diagnose.code, "No peer answered at" in written["run"]) == (DONE, True), written["run"]
