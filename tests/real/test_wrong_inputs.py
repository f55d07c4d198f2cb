"""What a person gets wrong: one clear message that says what to do, an exit code, never a traceback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.errors import LATER, MEND
from protocol.run.manifest import preset_text
from tests.real.daemons import PATIENCE, NodeDaemon, SeedDaemon

NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWB1nCVQyW3BE4zaVYJexq3mR44ZNQQNjX5Q1yseqVU9z4"


def run(module: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NOLOCO_")}
    environment["COLUMNS"] = "120"
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=cwd,
        env=environment,
        check=False,
    )


def assert_refused(result: subprocess.CompletedProcess[str], *said: str) -> None:
    """The command failed, said why and what to do, and showed no traceback."""
    output = result.stdout + result.stderr
    assert result.returncode not in (0, 1), output
    assert "Traceback" not in output
    for words in said:
        assert words in output, output


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeedDaemon]:
    daemon = SeedDaemon(tmp_path_factory.mktemp("run"), "--preset", "tiny")
    yield daemon
    daemon.kill()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), ("noloco join /ip4/", "noloco found", "noloco swarm")),
        (("--join", "not-an-address"), ("not-an-address", "/p2p/")),
        (("--join", NOBODY), ("No peer answered", "Check that")),
        (("--join", NOBODY, "--device", "gpu"), ("gpu", "--device cpu")),
        (("--join", NOBODY, "--stage", "-7"), ("--stage",)),
        (("--join", NOBODY, "--config", "missing.toml"), ("missing.toml",)),
        (("--join", NOBODY, "--from-checkpoint", "my/model/here"), ("my/model/here is not a directory",)),
        (
            ("--join", NOBODY, "--trace", "missing/t.json"),
            ("Cannot write the trace missing/t.json", "--trace"),
        ),
        (("--join", NOBODY, "--trace", "/dev/full"), ("No space left", "Free some space", "--trace")),
    ],
    ids=[
        "no address",
        "bad address",
        "nobody there",
        "bad device",
        "bad stage",
        "no settings file",
        "no checkpoint",
        "no trace folder",
        "full disk",
    ],
)
def test_a_node_that_cannot_join_says_what_to_do(
    arguments: tuple[str, ...], said: tuple[str, ...], tmp_path: Path
) -> None:
    assert_refused(run("node.cli", "--host", "127.0.0.1", "--no-relay", *arguments, cwd=tmp_path), *said)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, ("no-such-model is not a directory", "Give the one that config.json and the weights are in")),
        ('{"model_type": "gpt2"}', ("of the type 'gpt2'", "llama, mistral, qwen2, qwen3")),
    ],
    ids=["no such checkpoint", "another family"],
)
def test_a_checkpoint_that_no_run_can_start_from(
    config: str | None, said: tuple[str, ...], tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "no-such-model").mkdir()
        (tmp_path / "no-such-model" / "config.json").write_text(config, encoding="utf-8")
    assert_refused(run("bootstrap.found_cli", "--from-checkpoint", "no-such-model", cwd=tmp_path), *said)
    assert not (tmp_path / "noloco-run").exists()


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        joining = ("--join", NOBODY, "--host", "127.0.0.1", "--port", port)
        assert_refused(run("node.cli", *joining, cwd=tmp_path), port, "in use", "--port")
        founding = ("--preset", "tiny", "--host", "127.0.0.1", "--port", port)
        assert_refused(run("bootstrap.found_cli", *founding, cwd=tmp_path), port, "in use", "--port")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--data", "missing-*.txt"), ("missing-*.txt",)),
        (("--data", "short.txt"), ("short",)),
        (("--stage", "5"), ("stages 0 to 1",)),
        (("--run", "0" * 32), ("not " + "0" * 32,)),
    ],
    ids=["no data", "too little data", "no such stage", "another run"],
)
def test_a_member_with_wrong_settings(
    seed: SeedDaemon, arguments: tuple[str, ...], said: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "short.txt").write_text("too short to train on")
    common = ("--join", seed.join_address(), "--host", "127.0.0.1", "--no-relay", "--stage", "0")
    assert_refused(run("node.cli", *common, *arguments, cwd=tmp_path), *said)


def test_a_stage_that_does_not_fit_into_memory(tmp_path: Path) -> None:
    text = preset_text("llama-6.8b").replace("128_002", "4_096")
    (tmp_path / "large.toml").write_text(text, encoding="utf-8")
    seed = SeedDaemon(tmp_path / "run", "--manifest", str(tmp_path / "large.toml"))
    try:
        arguments = ("--join", seed.join_address(), "--host", "127.0.0.1", "--no-relay", "--stage", "1")
        result = run("node.cli", *arguments, cwd=tmp_path)
    finally:
        seed.kill()
    assert_refused(result, "GiB of memory", "larger machine")


def test_impossible_and_altered_manifests(tmp_path: Path) -> None:
    (tmp_path / "steep.toml").write_text(preset_text("tiny").replace("gamma = 1.0", "gamma = 1.9"))
    result = run("bootstrap.found_cli", "--manifest", "steep.toml", cwd=tmp_path)
    assert_refused(result, "steep.toml", "gamma", "1.500")

    founding = SeedDaemon(tmp_path / "run", "--preset", "tiny")
    founding.join_address()
    founding.kill()
    manifest = tmp_path / "run" / "manifest.noloco"
    raw = bytearray(manifest.read_bytes())
    raw[len(raw) // 2] ^= 1
    manifest.write_bytes(raw)
    assert_refused(run("bootstrap.found_cli", "--state-dir", "run", "--port", "0", cwd=tmp_path), "signature")


def test_an_interrupt_lets_a_node_leave_whether_it_trains_or_waits(seed: SeedDaemon, tmp_path: Path) -> None:
    """What a second one does: test_signals.py."""
    node = NodeDaemon(tmp_path / "node", "--join", seed.join_address(), "--stage", "0")
    node.wait_for_event("no-peer")  # stage 0 alone has nobody to send to
    node.signal(signal.SIGINT)
    node.signal(signal.SIGINT)  # at once, as of `timeout`: the two are one
    assert node.process.wait(PATIENCE) == 0, node.output
    graceful = NodeDaemon(tmp_path / "other", "--join", seed.join_address(), "--stage", "1")
    graceful.wait_for_event("serving")
    assert graceful.leave() == 0, graceful.output
    assert "Left the swarm" in graceful.output


def test_names_that_are_not_utf_8_are_told_like_others(tmp_path: Path) -> None:
    """Of the text, of the state directory with its log, and of a file that is not there."""
    place = tmp_path / os.fsdecode(b"caf\xe9")
    place.mkdir()
    (place / "text.txt").write_text("text " * 100, encoding="utf-8")
    given = ("--join", NOBODY, "--host", "127.0.0.1", "--state-dir", str(place / "state"))
    asked = run("node.cli", *given, "--data", str(place / "text.txt"), cwd=tmp_path)
    assert asked.returncode == LATER, asked.stderr
    assert "No peer answered" in asked.stderr
    missing = run("node.cli", *given, "--data", str(place / "none.txt"), cwd=tmp_path)
    assert missing.returncode == MEND
    assert r"caf\udce9/none.txt" in missing.stderr
    for done in (asked, missing):
        assert "Traceback" not in done.stderr
        assert "Logging error" not in done.stderr
