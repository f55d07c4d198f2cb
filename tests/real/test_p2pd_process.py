"""The p2pd process: what stops it from starting, what it leaves behind, and what an import must not change."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from protocol.errors import PeerUnreachable, ResourceError, StateError, UserError
from protocol.records.identity import Identity
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport
from protocol.transport.p2pd import pids_known
from tests.transport_network import DEADLINE, ECHO, KEY, PATIENCE, ask, echo


def make(folder: Path, name: str = "a", **settings: object) -> Libp2pTransport:
    key_file = folder / f"{name}.key"
    Identity.from_seed("process", name).save(key_file)
    return Libp2pTransport(key_file, Libp2pConfig(**settings))  # type: ignore[arg-type]


def p2pd_of(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children(recursive=True) if "p2pd" in child.name()]


def sockets_of(pid: int) -> list[Path]:
    return [
        path
        for folder in ("/tmp", os.environ.get("TMPDIR", "/tmp"))
        for path in Path(folder).glob(f"noloco-{pid}-*")
    ]


async def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ResourceError, match=rf"Port {port} is in use.*--port"):
            await make(tmp_path, port=port).start()
    assert sockets_of(os.getpid()) == []


async def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    gone = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await gone.wait()
    left, others = (Path(f"/tmp/noloco-{pid}-{pids_known()}-test") for pid in (gone.pid, os.getppid()))
    for directory in (left, others):
        directory.mkdir(exist_ok=True)
    transport = make(tmp_path)
    await transport.start()
    await transport.close()
    assert not left.exists()
    others.rmdir()  # it is still there: its process runs


async def test_a_port_taken_by_another_peer_is_named(tmp_path: Path) -> None:
    first = make(tmp_path, "a")
    await first.start()
    port = int(first.addresses()[0].split("/")[4])
    with pytest.raises(ResourceError, match=rf"Port {port} is in use"):
        await make(tmp_path, "b", port=port).start()
    await first.close()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"host": "seed.example.org"}, "not an IP address"),
        ({"host": "203.0.113.7"}, "This machine has no address 203.0.113.7"),
        ({"announce": ("/ip4/203.0.113.7/tcp/31337",)}, "--port"),
        ({"announce": ("nonsense",), "port": 20_000 + os.getpid() % 10_000}, "--announce"),
        ({"startup_timeout": 0.001}, "did not start within 0.001 s"),
    ],
)
async def test_what_prevents_the_start_is_explained(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    transport = make(tmp_path, **settings)
    with pytest.raises(UserError, match=reason):
        await transport.start()
    await transport.close()
    assert p2pd_of(psutil.Process()) == []
    assert sockets_of(os.getpid()) == []


async def test_a_p2pd_that_refuses_to_start_is_quoted(tmp_path: Path) -> None:
    transport = make(tmp_path)
    (tmp_path / "a.key").write_bytes(b"damaged after it was read")
    with pytest.raises(UserError, match=r"p2pd did not start.*(identity|key|proto)"):
        await transport.start()
    assert sockets_of(os.getpid()) == []


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"nothing\.key"):
        Libp2pTransport(tmp_path / "nothing.key")


async def test_announced_addresses_replace_those_of_the_machine(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    transport = make(tmp_path, port=port, announce=("/ip4/203.0.113.7/tcp/40000",))
    await transport.start()
    assert transport.addresses() == [f"/ip4/203.0.113.7/tcp/40000/p2p/{transport.peer_id}"]
    await transport.close()


async def test_an_observer_reads_and_calls_but_listens_and_stores_nothing(tmp_path: Path) -> None:
    member, observer = make(tmp_path, "member"), make(tmp_path, "observer", client_only=True)
    await member.start()
    await observer.start()
    await member.serve(ECHO, echo)
    assert observer.addresses() == []
    assert not await observer.put(KEY, b"lost", 60, DEADLINE)
    assert await member.put(KEY, b"seen", 60, DEADLINE)
    assert await observer.connect(member.addresses(), DEADLINE) == [member.peer_id]
    assert [record.value for record in await observer.get(KEY, DEADLINE)] == [b"seen"]
    stream = await observer.open(member.peer_id, ECHO, DEADLINE)
    assert await ask(stream, b"hello") == b"hello"
    stream.close()
    assert await observer.put(KEY, b"kept by the member", 60, DEADLINE)
    assert len(await member.get(KEY, DEADLINE)) == 2
    await observer.close()
    await member.close()


async def test_what_a_peer_shows_of_its_process(tmp_path: Path) -> None:
    transport = make(tmp_path)
    peer = f"Peer: …{transport.peer_id[-8:]}"
    rest = "Protocols: 1 | Book: 0 peers | Tasks: {}"
    await transport.serve(ECHO, echo)
    assert repr(transport) == f"<Libp2pTransport [{peer} | p2pd: not started | {rest.format(0)}]>"
    await transport.start()
    [child] = p2pd_of(psutil.Process())
    port = transport.addresses()[0].split("/")[4]
    process = f"p2pd: {child.pid}, port {port}"
    assert repr(transport) == f"<Libp2pTransport [{peer} | {process} | {rest.format(4)}]>"
    assert transport.neighbours() == []
    await transport.close()
    assert repr(transport) == f"<Libp2pTransport [{peer} | p2pd: down, port {port} | {rest.format(0)}]>"
    assert transport.pid is None


async def test_closing_leaves_neither_a_process_nor_a_socket(tmp_path: Path) -> None:
    transport = make(tmp_path)
    await transport.start()
    [child] = p2pd_of(psutil.Process())
    assert sockets_of(os.getpid()) != []
    await transport.close()
    assert not child.is_running()
    assert sockets_of(os.getpid()) == []


async def test_closing_ends_even_a_frozen_p2pd(tmp_path: Path) -> None:
    transport = make(tmp_path)
    await transport.start()
    [child] = p2pd_of(psutil.Process())
    child.suspend()
    await asyncio.wait_for(transport.close(), PATIENCE)
    assert not child.is_running()


def test_p2pd_does_not_outlive_a_process_that_is_killed(tmp_path: Path) -> None:
    program = """
        import asyncio, sys
        from pathlib import Path
        from protocol.records.identity import Identity
        from protocol.transport.libp2p import Libp2pTransport

        async def main():
            key_file = Path(sys.argv[1])
            Identity.generate().save(key_file)
            transport = Libp2pTransport(key_file)
            await transport.start()
            print("ready", flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "key")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        [child] = p2pd_of(psutil.Process(parent.pid))
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        patience = time.monotonic() + PATIENCE
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < patience
            time.sleep(0.05)


def test_importing_the_transport_changes_nothing_else() -> None:
    program = """
        import logging, sys
        import torch.multiprocessing
        strategy = torch.multiprocessing.get_sharing_strategy()
        import protocol.transport.base
        assert "hivemind" not in sys.modules
        import protocol.transport.libp2p
        assert "hivemind" in sys.modules
        assert torch.multiprocessing.get_sharing_strategy() == strategy
        assert logging.getLevelName(logging.WARNING) == "WARNING"
        assert logging.getLogger("hivemind").handlers == []
        assert logging.getLogger("hivemind").propagate
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


async def test_the_log_says_when_a_peer_cannot_be_dialled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transport = make(tmp_path)
    await transport.start()
    nobody = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.from_seed('nobody').peer_id}"
    with caplog.at_level(logging.INFO, "protocol"):
        assert await transport.connect([nobody], DEADLINE) == []
    assert f"No answer from {nobody}" in caplog.text
    with pytest.raises(PeerUnreachable):
        await transport.open(Identity.from_seed("nobody").peer_id, ECHO, DEADLINE)
    await transport.close()
