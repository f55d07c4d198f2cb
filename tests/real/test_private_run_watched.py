"""A private run that its founder and a volunteer look at, without a word of tokens: the page, and the tools."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.patience import patience
from tests.real.daemons import NodeDaemon, SeedDaemon, run_tool, wait_until
from tests.real.test_private_run import MANIFEST, bootstrap

TOOLS = {
    "status": ("status",),
    "contributors": ("contributors",),
    "links": ("links",),
    "doctor": ("doctor", "--port", "0", "--host", "127.0.0.1"),
}


def tool(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`noloco …` as somebody types it in a folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NOLOCO_")}
    return subprocess.run(
        [sys.executable, "-m", "bootstrap.tools_cli", *arguments],
        capture_output=True,
        text=True,
        timeout=patience(240.0),
        check=False,
        cwd=folder,
        env=environment,
    )


def page_of(daemon: NodeDaemon | SeedDaemon) -> str:
    address = daemon.wait_for(r"Dashboard of run 'secret': (http://127\.0\.0\.1:\d+/)").group(1)
    with urlopen(f"{address}metrics", timeout=20) as answer:
        return str(answer.read().decode())


def curve(folder: Path, join: str) -> str:
    """What `noloco watch` writes until its first point is there."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NOLOCO_")}
    command = [
        sys.executable,
        "-m",
        "bootstrap.tools_cli",
        "watch",
        "--join",
        join,
        "--events",
        "curve.jsonl",
    ]
    with (folder / "watch.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--seconds", "1"], cwd=folder, env=environment, stdout=log, stderr=log
        )
        try:
            file = folder / "curve.jsonl"
            wait_until(lambda: file.exists() and file.read_text(), while_true=lambda: process.poll() is None)
        finally:
            process.terminate()
            process.wait(30)
    assert file.exists(), (folder / "watch.log").read_text()
    return file.read_text()


@pytest.mark.timeout(900)
def test_the_founder_and_a_volunteer_look_without_a_token(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(MANIFEST, encoding="utf-8")
    founder, volunteer = tmp_path / "founder", tmp_path / "volunteer"
    for folder in (founder, volunteer):
        folder.mkdir()
    seed = SeedDaemon(
        founder / "noloco-run", "--manifest", str(tmp_path / "run.toml"), "--dashboard", "127.0.0.1:0"
    )
    address = seed.join_address()
    given = bootstrap("invite", "--dir", str(founder / "noloco-run"))
    node = NodeDaemon(
        volunteer / "noloco-state", "--join", address, "--token", given, "--dashboard", "127.0.0.1:0",
        "--gpu-percent", "20",
    )  # fmt: skip
    node.wait_for_step(1, patience(240.0))
    for folder in (volunteer, founder):
        for name, typed in TOOLS.items():
            looked = tool(folder, *typed, "--join", address)
            told = f"{folder.name}, {name}:\n{looked.stdout}\n{looked.stderr}"
            assert looked.returncode in ((0, 1) if name == "doctor" else (0,)), told
            assert "nobody trains" not in looked.stdout, told
            if name == "doctor":
                assert "The members let this machine in" in looked.stdout, told
            if name == "status":
                assert looked.stdout.count("serving") == 1, told
        assert '"members": 1' in curve(folder, address)
    for daemon in (seed, node):
        assert wait_until(lambda one=daemon: 'peer="12D3' in page_of(one)), page_of(daemon)
        assert "give the token" not in daemon.output

    # the token is used up by its node: another one is refused, and neither a visitor with it nor the node itself is
    thief = NodeDaemon(tmp_path / "thief", "--join", address, "--token", given)
    thief.wait_for("as many others as the invitation is for have used it")
    assert run_tool("status", "--join", address, "--token", given).returncode == 0
    node.leave()
    again = NodeDaemon(volunteer / "noloco-state", "--join", address, "--gpu-percent", "20")
    again.wait_for_step(node.step + 1)

    bootstrap("revoke", given, "--dir", str(founder / "noloco-run"))
    assert wait_until(lambda: not again.still_running(), patience(90.0))
    looked = run_tool("status", "--join", address, "--token", given)
    assert looked.returncode == 2
    assert "has revoked the invitation" in looked.stderr
    assert "nobody trains" not in looked.stdout
