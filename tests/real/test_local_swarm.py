"""`noloco swarm`: the newcomer's one command, from start to summary."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from bootstrap.lab.simulation.learning import text_of
from protocol.run.manifest import load_preset
from tests.patience import patience
from tests.pretrained import saved_model
from tests.real.daemons import started, wait_until
from tests.real.local_swarm import swarm_command


def descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def start(directory: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """The command as a user starts it, its output in output.log."""
    command = swarm_command(directory, *arguments)
    with (directory / "output.log").open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    started.append(process.pid)
    return process


def said(directory: Path) -> str:
    return (directory / "output.log").read_text()


@pytest.mark.timeout(patience(900))
def test_a_short_swarm_trains_and_exports(tmp_path: Path) -> None:
    """In the gate: nothing here depends on how fast it goes."""
    process = start(tmp_path, "--steps", "60", "--replicas", "2", "--validation-sequences", "16")
    assert process.wait(patience(840)) == 0, said(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["complete"]
    assert sorted(summary["nodes"]) == ["s0r0", "s0r1", "s1r0", "s1r1"]
    assert summary["validation_loss"][-1][2] < summary["validation_loss"][0][2]
    assert summary["export"]["difference"] < 1e-3


@pytest.mark.timeout(400)
def test_six_peers_train_one_model(tmp_path: Path) -> None:
    process = start(
        tmp_path, "--steps", "220", "--validation-sequences", "32", "--picture", str(tmp_path / "t.svg"),
        "--trace", str(tmp_path / "trace.json"),
    )  # fmt: skip
    assert process.wait(380) == 0, said(tmp_path)
    words = [
        "Starting a swarm",
        "importing torch",
        "Started 6 nodes",
        "The loss starts at",
        "6/6 alive",
        "bigram",
    ]
    assert [word for word in words if word not in said(tmp_path)] == []
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["complete"]
    assert summary["validation_loss"][0][2] > summary["unigram_entropy"] > summary["bigram_entropy"]
    assert summary["validation_loss"][-1][2] < summary["unigram_entropy"] - 0.4
    assert 0 < summary["replica_spread"] < 0.05
    nodes = summary["nodes"]
    assert sorted(nodes) == ["s0r0", "s0r1", "s0r2", "s1r0", "s1r1", "s1r2"]
    for node in nodes.values():
        assert node["pair_averagings"] > 0
        assert node["rounds"] >= node["pair_averagings"]
        if node["stage"] == 0:
            assert sorted(node["sent"]) == ["s1r0", "s1r1", "s1r2"]
            assert node["steps"] == 220
    assert (tmp_path / "t.svg").read_text().startswith("<svg")

    tell_the_same(summary, json.loads((tmp_path / "trace.json").read_text()))

    # the export is what the swarm evaluated, by code that knows nothing of us
    assert summary["export"]["difference"] < 1e-3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export", dtype=torch.float32)
    held_out, _ = next(iter(text_of(load_preset("tiny")).validation_batches(128, 1)))
    loss = model(input_ids=held_out, labels=held_out).loss.item()
    assert loss < summary["unigram_entropy"] + 0.5


def tell_the_same(summary: dict[str, Any], trace: list[dict[str, Any]]) -> None:
    """The merged trace has what each node did, and says of its time what the node said of itself."""
    labels = {e["pid"]: e["args"]["labels"] for e in trace if e["name"] == "process_labels"}
    assert sorted(labels.values()) == sorted(summary["nodes"])
    assert all(event["dur"] >= 0 for event in trace if event["ph"] == "X")
    for process, name in labels.items():
        node = summary["nodes"][name]
        events = [event for event in trace if event["pid"] == process]
        jobs = sorted((e for e in events if e.get("cat") == "compute thread"), key=lambda e: e["ts"])
        assert all(one["ts"] + one["dur"] <= two["ts"] for one, two in pairwise(jobs))
        is_first = node["stage"] == 0
        assert {"inner step", "outer step", *(("forward", "backward") if is_first else ("last stage",))} <= {
            job["name"] for job in jobs
        }
        sent = [e for e in events if e.get("cat") == "send"]
        kind = "forward" if is_first else "gradient"
        assert any(e["name"] == f"pipeline: {kind}" and e["args"]["bytes"] > 1_000 for e in sent)
        assert any(e["name"] == "gossip: contribute" for e in sent)
        waits_of_one_microbatch_end_after_they_begin(events, is_first)

        # The node's clock began with its first job in the queue. It was asked a few times after training; the
        # summary has one of the answers. Two stopwatches around each job differ by microseconds of milliseconds.
        began = jobs[0]["ts"] - jobs[0]["args"]["waited_ms"] * 1e3
        trained = sum(job["dur"] for job in jobs if job["args"]["priority"] != "serve")
        asked = [e["ts"] for e in sent if e["name"] == "control: node-stats"][-6:]
        assert trained / (asked[-1] - began) - 0.02 <= node["compute_fraction"]
        assert node["compute_fraction"] <= trained / (asked[0] - began) + 0.02
        assert 0 < node["compute_fraction"] < 1


def waits_of_one_microbatch_end_after_they_begin(events: list[dict[str, Any]], is_first: bool) -> None:
    begun = {(e["cat"], e["id"]): e for e in events if e["ph"] == "b"}
    ended = {(e["cat"], e["id"]): e for e in events if e["ph"] == "e"}
    assert begun.keys() == ended.keys()
    assert all(ended[wait]["ts"] >= begun[wait]["ts"] for wait in begun)
    assert {cat for cat, _ in begun} == ({"gate", "gradient"} if is_first else {"gate"})
    assert all(e["args"]["microbatch"] for e in begun.values())


def wait_for_nodes(process: subprocess.Popen[bytes], count: int) -> list[psutil.Process]:
    """The node processes and their p2pd once all of them run, with those of the seed peer and of the page."""
    wait_until(lambda: sum("p2pd" in child.name() for child in descendants(process)) >= count + 2)
    return descendants(process)


def test_ctrl_c_stops_every_process_and_keeps_what_was_measured(tmp_path: Path) -> None:
    process = start(tmp_path, "--replicas", "1", "--validation-sequences", "8")
    children = wait_for_nodes(process, 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, said(tmp_path)
    assert "Traceback" not in said(tmp_path)
    assert (tmp_path / "summary.json").exists()
    _, alive = psutil.wait_procs(children, timeout=patience(60))
    assert not alive


@pytest.mark.timeout(300)
def test_ctrl_c_during_the_training_tells_what_was_trained(tmp_path: Path) -> None:
    process = start(tmp_path, "--replicas", "1", "--validation-sequences", "8")
    assert wait_until(lambda: re.search(r" [1-9][\d,]* tokens", said(tmp_path))), said(tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.wait(100) == 130, said(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["tokens"] > 0
    assert {node["stage"] for node in summary["nodes"].values()} == {0, 1}
    assert f"trained          {summary['tokens']:,} tokens in" in said(tmp_path)
    if len(summary["validation_loss"]) == 1:
        assert "(ended before it was measured again)" in said(tmp_path)


@pytest.mark.timeout(220)
def test_a_mistyped_path_leaves_an_earlier_summary_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("of a good run")
    process = start(tmp_path, "--data", str(tmp_path / "typo.txt"))
    assert process.wait(200) == 2, said(tmp_path)
    assert "typo.txt" in said(tmp_path)
    assert "Traceback" not in said(tmp_path)
    assert (tmp_path / "summary.json").read_text() == "of a good run"


@pytest.mark.timeout(500)
def test_a_swarm_lives_through_chaos(tmp_path: Path) -> None:
    """As many faults as a minute and a half has; the bounds of the comparison are for long runs on idle machines."""
    process = start(tmp_path, "--chaos", "26", "--minutes", "1.5", "--validation-sequences", "32")
    assert process.wait(480) == 0, said(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    chaos = summary["chaos"]
    assert len(chaos["faults"]) >= 4, said(tmp_path)
    assert chaos["ended"] == {}
    assert chaos["disturbed"]["tokens"] > 0.2 * chaos["calm"]["tokens"]
    assert chaos["disturbed_loss"] < chaos["undisturbed_loss"] + 0.5
    assert chaos["left_behind"] == []


def test_a_killed_swarm_leaves_no_process_behind(tmp_path: Path) -> None:
    process = start(tmp_path, "--replicas", "1", "--validation-sequences", "8")
    children = wait_for_nodes(process, 2)
    process.kill()
    process.wait()
    # the kernel ends the nodes at once; their p2pd notice the closed socket and end by themselves
    _, alive = psutil.wait_procs(children, timeout=patience(90))
    assert not alive, [child.cmdline() for child in alive]


@pytest.mark.timeout(300)
def test_a_swarm_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Around a ring, for its embeddings are tied. Its random weights are large: it knows less than nothing."""
    model = saved_model(tmp_path / "model", tie_word_embeddings=True, max_position_embeddings=256)
    process = start(
        tmp_path, "--from-checkpoint", str(tmp_path / "model"), "--replicas", "1", "--steps", "60",
        "--validation-sequences", "16",
    )  # fmt: skip
    assert process.wait(280) == 0, said(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["complete"], said(tmp_path)
    begun, ended = summary["validation_loss"][0][2], summary["validation_loss"][-1][2]
    assert begun > math.log(256)
    assert ended < begun - 0.1
    assert summary["export"]["difference"] < 1e-3
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export")
    assert exported.config.hidden_size == model.config.hidden_size
