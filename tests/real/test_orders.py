"""`noloco node pause, resume, finish, status, limits`: a volunteer steers a daemon that runs."""

from __future__ import annotations

import asyncio
import json
import re
import stat
import time
import urllib.error
import urllib.request
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.watch.health import SOCKET_FILE, health_served
from protocol.errors import UserError
from tests.real.daemons import NodeDaemon, SeedDaemon, run_tool, wait_until
from tests.real.test_bandwidth import PRESET


def order(node: NodeDaemon, name: str) -> str:
    done = run_tool("node", name, "--state-dir", str(node.state))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_the_page_beside_a_node_has_texts_written_pauses_the_node_and_ends_it(tmp_path: Path) -> None:
    seed = SeedDaemon(tmp_path / "run", "--preset", "tiny")
    join = ("--join", seed.join_address())
    NodeDaemon(tmp_path / "first", *join, "--stage", "0")
    node = NodeDaemon(tmp_path / "node", *join, "--stage", "1", "--dashboard", "127.0.0.1:0")
    address = node.wait_for(r"Dashboard of run 'tiny': (http://127\.0\.0\.1:\d+)/", 180.0)[1]
    with urllib.request.urlopen(address, timeout=30) as answer:
        secret = re.search(r'name="noloco-secret" content="([\w-]+)"', answer.read().decode())
    assert secret is not None

    def post(path: str, body: str) -> str:
        headers = {"Origin": address, "X-Noloco-Secret": secret[1]}
        request = urllib.request.Request(f"{address}/{path}", body.encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=90) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as refusal:
            with refusal:
                return str(refusal.read().decode())

    def state() -> dict[str, Any]:
        with urllib.request.urlopen(f"{address}/state", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    node.wait_for_step(3)
    said = list[str]()

    def is_written() -> bool:
        said.append(post("write", "Once upon a time"))
        return "list below" in said[-1]

    assert wait_until(is_written, 120.0), set(said)  # once the page knows that both stages serve
    assert any(sample[-1].startswith("Once upon a time") for sample in state()["samples"])
    assert "It pauses" in post("order", "pause")
    node.wait_for_event("paused")
    assert "takes its stage up again" in post("order", "resume")
    assert "It leaves" in post("order", "finish")
    assert node.process.wait(60) == 0, node.output


@pytest.mark.timeout(300)
def test_a_node_pauses_resumes_and_finishes_as_it_is_told(tmp_path: Path) -> None:
    seed = SeedDaemon(tmp_path / "run", "--preset", "tiny")
    address = seed.join_address()
    nodes = [
        NodeDaemon(tmp_path / f"node-{number}", "--join", address, "--stage", str(min(number, 1)))
        for number in range(3)
    ]
    first, paused, other = nodes
    paused.wait_for_step(3)
    socket = Path((paused.state / SOCKET_FILE).read_text(encoding="utf-8"))
    assert stat.S_IMODE(socket.stat().st_mode) == 0o600

    assert "Paused" in order(paused, "pause")
    seconds = paused.wait_for_event("paused")["time"] - paused.wait_for_event("pausing")["time"]
    print(f"paused after {seconds:.1f} s")
    assert "paused" in order(paused, "status")
    assert "you asked for it" in order(paused, "status")
    before = paused.step
    assert list(paused.state.glob("checkpoint-*.safetensors"))
    first.wait_for_step(first.step + 5)  # the other replica takes its part
    assert paused.step == before
    assert not first.events("microbatches-dropped")

    assert "takes its stage up again" in order(paused, "resume")
    paused.wait_for_step(before + 3)
    assert len({event["addresses"][0] for event in paused.events("addresses")}) == 1  # the same peer
    assert re.search(r"serving, stage 1, step \d+, round \d+, [\d,]+ tokens", order(paused, "status"))
    assert "It leaves" in order(other, "finish")
    assert other.process.wait(60) == 0, other.output
    for node in (paused, first):
        assert node.leave() == 0, node.output


@pytest.mark.timeout(300)
def test_a_pause_gives_the_memory_of_a_large_stage_back(tmp_path: Path) -> None:
    """On a CPU, so that it is the process's. 33 million parameters: θ, φ, δ, gradients, two moments in float32."""
    manifest = tmp_path / "large.toml"
    text = PRESET.read_text(encoding="utf-8")
    for name, value in (("hidden_size", 1024), ("intermediate_size", 4096), ("heads", 8)):
        text = re.sub(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
    text = text.replace('optimizer = "muon"', 'optimizer = "adamw"')  # Muon has one moment
    text = re.sub(r"^muon_learning_rate.*\n", "", text, flags=re.MULTILINE)
    manifest.write_text(text, encoding="utf-8")
    seed = SeedDaemon(tmp_path / "run", "--manifest", str(manifest))
    node = NodeDaemon(tmp_path / "node", "--join", seed.join_address(), "--stage", "1")
    parameters = int(node.wait_for(r"\(([\d,]+) parameters\)").group(1).replace(",", ""))
    process = psutil.Process(node.process.pid)
    before = process.memory_info().rss
    began = time.monotonic()
    order(node, "pause")
    seconds, after = time.monotonic() - began, process.memory_info().rss
    print(f"{parameters:,} parameters: {before >> 20} MiB, paused {after >> 20} MiB after {seconds:.1f} s")
    assert (
        before - after > 0.8 * 6 * 4 * parameters
    )  # when the command has returned; how soon is told, not asserted
    order(node, "resume")
    node.wait_for(r"Continuing from the checkpoint")
    assert node.leave() == 0, node.output


async def test_a_device_s_node_is_ordered_alone_and_refusals_are_told(tmp_path: Path) -> None:
    """The nodes are made up; the sockets and the command are real."""
    heard: dict[str, list[dict[str, Any]]] = {}
    async with AsyncExitStack() as nodes:
        for index, device in enumerate(("cuda:2", "cuda:0", "cpu")):
            state = tmp_path / f"device-{index}"
            state.mkdir()
            await nodes.enter_async_context(made_up_node(state, device, heard.setdefault(device, [])))

        async def ordered(*arguments: str) -> tuple[int, str, str]:
            done = await asyncio.to_thread(run_tool, "node", *arguments, "--state-dir", str(tmp_path))
            return done.returncode, done.stdout, done.stderr

        assert (await ordered("resume", "--device", "cuda"))[0] == 0
        assert {device: len(orders) for device, orders in heard.items()} == {
            "cuda:2": 0,
            "cuda:0": 1,
            "cpu": 0,
        }
        code, said, _ = await ordered("limits", "--device", "cuda:2", "--max-upload", "20Mbit", "--only-idle")
        assert code == 0
        assert heard["cuda:2"] == [{"order": "limits", "limits": {"max_upload": "20Mbit", "only_idle": True}}]
        assert "start this device's node by itself" in said
        code, said, _ = await ordered("limits", "--max-upload", "30Mbit")
        assert 'max_upload = "30Mbit"' in said
        assert {orders[-1]["limits"]["max_upload"] for orders in heard.values()} == {"10Mbit"}

        code, _, error = await ordered("pause", "--device", "cuda:7")
        assert (code, "there are cuda:2, cuda:0, cpu" in error) == (2, True), error
        code, _, error = await ordered("limits", "--max-temperature", "70")
        assert code != 0
        assert "device-2 stays as it is: This machine does not tell" in error
        before = [len(orders) for orders in heard.values()]
        code, _, error = await ordered("limits", "--hours", "noon")
        assert code != 0
        assert "--hours" in error
        assert [len(orders) for orders in heard.values()] == before
        assert "Traceback" not in error


def made_up_node(state: Path, device: str, heard: list[dict[str, Any]]) -> AbstractAsyncContextManager[None]:
    """A node that does as it is told, but for a processor, which tells no temperature."""

    def limits(said: dict[str, Any]) -> None:
        heard.append(said)
        if device == "cpu" and "max_temperature" in said["limits"]:
            raise UserError("This machine does not tell how hot its cpu is.")

    report = {"peer": "12D3KooW", "healthy": True, "state": "serving", "device": device, "limits": {}}
    return health_served(
        state, lambda: report, {"limits": limits, "resume": heard.append, "pause": heard.append}
    )


def test_without_a_node_it_says_so(tmp_path: Path) -> None:
    done = run_tool("node", "pause", "--state-dir", str(tmp_path))
    assert done.returncode != 0
    assert "--state-dir" in done.stderr
    assert "Traceback" not in done.stderr
