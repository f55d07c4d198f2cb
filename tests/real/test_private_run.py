"""A private run with real processes: founded, joined with words and with a token, and left by a revoked node."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from protocol.errors import MEND
from tests.patience import patience
from tests.real.daemons import NodeDaemon, SeedDaemon, run_tool, wait_until

MANIFEST = """
name = "secret"
stages = 1
model = { vocab_size = 256, hidden_size = 16, layers = 1, heads = 2, intermediate_size = 32, rope_theta = 10000.0, norm_eps = 1e-5, seed = 1 }
data = { sequence_tokens = 16 }
inner = { learning_rate = 1e-3, min_learning_rate = 1e-4, warmup_steps = 1, total_steps = 1000000, microbatches = 1, sequences = 1 }
outer = { inner_steps = 1000 }
access = { private = true }
"""  # noqa: E501


def bootstrap(*arguments: str) -> str:
    command = [sys.executable, "-m", "bootstrap.found_cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60.0), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.timeout(900)
def test_invited_revoked_and_never_invited(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(MANIFEST, encoding="utf-8")
    run = str(tmp_path / "seed")
    seed = SeedDaemon(tmp_path / "seed", "--manifest", str(tmp_path / "run.toml"))
    address = seed.join_address()
    helper = str(tmp_path / "helper.noloco")
    bootstrap("delegate", helper, "--state-dir", run)
    words, delegated = (
        bootstrap("invite", "--words", "--state-dir", run),
        bootstrap("invite", "--delegate", helper),
    )
    at = "127.0.0.1:" + address.split("/")[4]
    nodes = [
        NodeDaemon(tmp_path / "node-0", words, "--at", at),
        NodeDaemon(tmp_path / "node-1", "--join", address, "--token", delegated),
    ]
    stranger = NodeDaemon(tmp_path / "stranger", "--join", address)
    stranger.wait_for("is private: give the token")
    for node in nodes:
        node.wait_for_step(1)
    thief = NodeDaemon(tmp_path / "thief", "--join", address, "--token", delegated)
    late = NodeDaemon(tmp_path / "late", *words.split("-"), "--join", address)
    thief.wait_for("as many others as the invitation is for have used it")
    assert not thief.events("serving")
    late.wait_for("The words have been used")
    assert late.process.wait(patience(30.0)) == MEND
    assert "The words let this node in" in nodes[0].output

    visitor = bootstrap("invite", "--state-dir", run)
    for shown in (["--token", visitor], []):  # or what it finds beside the daemons of this user
        looked = run_tool("status", "--join", address, *shown)
        assert looked.returncode == 0, looked.stderr
        assert looked.stdout.count("serving") == 2, looked.stdout

    nodes[0].leave()
    nodes[0] = NodeDaemon(tmp_path / "node-0", "--join", address)  # the token is in its state directory
    before = nodes[0].step
    bootstrap("revoke", delegated, "--state-dir", run)
    began = time.monotonic()
    assert wait_until(lambda: not nodes[1].still_running(), 90)
    assert time.monotonic() - began < 60
    assert "revoked" in nodes[1].output
    nodes[0].wait_for_step(before + 1)
    assert (tmp_path / "node-0").stat().st_mode & 0o777 == 0o700
    for secret in ("node-0/token", "node-0/identity.key", "seed/run.key", "seed/words.json", "helper.noloco"):
        assert (tmp_path / secret).stat().st_mode & 0o777 == 0o600, secret
