"""What objects show of themselves: one line, short peer ids, numbers with units, no keys, and never an error."""

from __future__ import annotations

import ast
import asyncio
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from bootstrap.lab.in_memory.virtual_time import run_virtual
from node.config import NodeConfig
from node.links.links import LinkEstimate, Links
from node.membership.view import View
from node.model.compute import InlineCompute, Priority
from node.model.replica import Replica
from protocol.access.admission import Admission
from protocol.access.peer_limits import BAN_AFTER_STRIKES, Allowance, Bans, Inflow, PeerTable, RequestLimiter
from protocol.access.tokens import Token
from protocol.ground import PeerId
from protocol.messages import Asker, Traffic
from protocol.messages.training import Ready
from protocol.records.announcement import Announcement
from protocol.rpc.door import Door
from protocol.rpc.rpc import Answer, Request
from protocol.supervision import Supervisor
from protocol.windows import amount, counted, short, window
from tests.swarm.micro import micro_manifest
from tests.unit.test_tokens import ALICE, OWNER, RUN, signed
from tests.unit.two_peers import idle, in_virtual_time, say_done, two_peers

ROOT = Path(__file__).parents[2]
LEAST = 60  # classes with a window


def _is_window(node: ast.stmt) -> bool:
    if not isinstance(node, ast.FunctionDef) or node.name != "__repr__":
        return False
    return any(isinstance(by, ast.Name) and by.id == "window" for by in node.decorator_list)


def with_windows() -> list[str]:
    """The classes that have one, as module:name."""
    return [
        f"{'.'.join(file.relative_to(ROOT).with_suffix('').parts)}:{found.name}"
        for package in ("protocol", "node", "bootstrap")
        for file in sorted((ROOT / package).rglob("*.py"))
        for found in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(found, ast.ClassDef) and any(map(_is_window, found.body))
    ]


def test_what_lives_long_has_a_window() -> None:
    assert len(with_windows()) >= LEAST


@pytest.mark.parametrize("name", with_windows())
def test_an_object_whose_making_failed_can_be_printed(name: str) -> None:
    module, kind = name.split(":")
    made: Any = type(kind, (getattr(import_module(module), kind),), {})
    made.__abstractmethods__ = frozenset()
    assert repr(made.__new__(made)).startswith(f"<{kind} [")


def test_a_window_says_that_it_cannot_look() -> None:
    class Broken:
        @window
        def __repr__(self) -> str:
            return f"Size: {1 // 0}"

    assert repr(Broken()) == "<Broken [cannot be seen: ZeroDivisionError]>"


def test_numbers_are_for_people() -> None:
    assert [amount(nbytes) for nbytes in (0, 1023, 1536, 2**20, 85.3 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.0 MiB",
        "85.3 GiB",
    ]
    assert [counted(1, "batch", "batches"), counted(0, "batch", "batches"), counted(1_000, "peer")] == [
        "1 batch",
        "0 batches",
        "1,000 peers",
    ]
    assert short("12D3KooWabcdefgh") == "…abcdefgh"


# --- protocol -----------------------------------------------------------------------------------


@in_virtual_time
async def test_what_a_peer_shows_while_it_asks_and_answers() -> None:
    async with two_peers() as two:
        ends = asyncio.Event()

        async def slow(request: Request[Ready]) -> Answer[Any]:
            await ends.wait()
            return await say_done(request)

        two.server.handle(Ready.answered_by(slow, Traffic.GOSSIP))
        assert repr(two.caller) == idle(two.caller)
        asking = asyncio.create_task(two.ask(deadline=60.0))
        await asyncio.sleep(1)
        caller, server = (short(rpc.transport.peer_id) for rpc in (two.caller, two.server))
        asks = "Channels: 1 open, 0 opening | Streams: of 0 peers | Places: 0 held | Coming: 0 B | Tasks: 1"
        answers = "Channels: 0 open, 0 opening | Streams: of 1 peer | Places: 1 held | Coming: 0 B | Tasks: 1"
        assert repr(two.caller) == f"<Rpc [Peer: {caller} | {asks}]>"
        assert repr(two.server) == f"<Rpc [Peer: {server} | {answers}]>"
        (channel,) = two.caller.channels
        assert repr(channel) == (
            f"<Channel [Peer: {server} | Traffic: gossip, open | Requests: 1 waiting, 1 asked]>"
        )
        assert two.server.streams_of(two.caller.transport.peer_id) == 1
        running = "running | Streams: 1 open, {} answered | Met: 1 peer"
        assert repr(two.caller.transport) == f"<MemoryTransport [Peer: {caller}, {running.format(0)}]>"
        assert repr(two.server.transport) == f"<MemoryTransport [Peer: {server}, {running.format(1)}]>"
        faults = "<Faults [Frozen: 0 | In parts: 0 | Waiting: 0]>"
        world = f"Running: 2 peers | Clock: 1.0 s, 0 skewed | Faults: {faults}"
        assert repr(two.network) == f"<MemoryNetwork [{world}]>"
        ends.set()
        await asking
        assert "Requests: 0 waiting, 1 asked" in repr(channel)
        two.caller.forget(two.address)
        await asyncio.sleep(1)
        assert "Traffic: gossip, broken" in repr(channel)
        assert [repr(rpc) for rpc in (two.caller, two.server)] == [*map(idle, (two.caller, two.server))]


def test_what_a_supervisor_shows() -> None:
    async def main() -> None:
        async def fails() -> None:
            raise ValueError("no")

        supervisor = Supervisor(lambda *_, **__: None)
        supervisor.keep("probing", lambda: asyncio.sleep(1_000), "")
        supervisor.group().keep("looking", fails, "")
        await asyncio.sleep(2.5)  # twice, a second apart and then two
        parts = "Parts: 2 kept, 1 failed, 1 restart"
        assert repr(supervisor) == f"<Supervisor [Tasks: 2 | {parts} | Groups: 1]>"
        await supervisor.close()

    run_virtual(main())


def test_what_limits_show() -> None:
    async def main() -> None:
        limiter = RequestLimiter()
        await limiter.take(1)
        waiting = asyncio.create_task(limiter.take(1))
        await asyncio.sleep(0)
        assert repr(limiter) == "<RequestLimiter [Places: 1 taken | Requests: 1 waiting]>"
        limiter.give_back()
        await waiting
        assert repr(limiter) == "<RequestLimiter [Places: 1 taken | Requests: 0 waiting]>"
        inflow = Inflow(2**20)
        await inflow.enter(limiter, 2**18)  # type: ignore[arg-type]
        assert repr(inflow) == "<Inflow [Coming: 1, 256.0 KiB of 1.0 MiB]>"

    run_virtual(main())
    bans, allowance, table = Bans(), Allowance((5, 0.5), (60, 1.0)), PeerTable[int](2)
    for number in range(3):
        allowance.take(PeerId(str(number)), 1, 0.0)
        bans.strike(PeerId(str(number)), 0.0)
        table[PeerId(str(number))] = number
    for _ in range(BAN_AFTER_STRIKES - 1):
        bans.strike(PeerId("0"), 0.0)
    assert repr(bans) == "<Bans [Offenders: 2 struck | Banned: 1 of late]>"
    assert repr(allowance) == "<Allowance [Each: 5 and 0.5/s | All: 60 and 1/s | Peers: 3 remembered]>"
    assert repr(table) == "<PeerTable [Peers: 2 of 2]>"


def test_what_a_door_shows() -> None:
    door = Door("run", {Asker.REPLICA: 1, Asker.BEFORE: 0}, lambda _: None, lambda: 0.0)
    stages = "1 for replica, 0 for before"
    assert repr(door) == f"<Door [Run: open | Stages: {stages} | Introduced: 0 | Visitors: 0 streams]>"
    admission = Admission(signed(), ALICE.peer_id, lambda: 0.0)
    assert repr(admission) == "<Admission [Shown: 0 | Revoked: 0]>"


def test_no_key_is_shown() -> None:
    token = Token.issue(RUN, OWNER, None, 1, 60.0)
    assert repr(OWNER) == f"<Identity [Peer: {short(OWNER.peer_id)}]>"
    assert repr(token) == f"<Token [Run: {token.run_id} | Uses: 1 | Signed by: the owner]>"
    config = NodeConfig(join=("/memory/x",), token=token.to_text())
    assert token.to_text() not in repr(config)


# --- node ---------------------------------------------------------------------------------------


def test_what_a_view_shows() -> None:
    view = View(lambda: 0.0)
    assert repr(view) == "<View [Members: none | Suspected: 0 of late]>"
    for number in range(3):
        said = Announcement(stage=number // 2, state="serving", since=0.0)
        view.update(PeerId(str(number)), said, 60.0)
    view.suspect(PeerId("1"))
    assert repr(view) == "<View [Members: 2 at stage 0, 1 at stage 1 | Suspected: 1 of late]>"


def test_what_links_show() -> None:
    links, link = Links(most=2), LinkEstimate()
    for number in range(3):
        links.visit(PeerId(str(number)), 0.0)
    assert repr(links) == "<Links [Peers: 2 of 2 | Dropped: 1]>"
    assert repr(link) == "<LinkEstimate [Round trip: unknown | Bandwidth: unknown | Under way: 0]>"
    link.note_round_trip(0.05, 0.0)
    link.note_transfer(2**20, 1.05, 0.0)
    rate = "1.0 MiB/s of 1 transfer"
    assert repr(link) == f"<LinkEstimate [Round trip: 50.0 ms of 1 | Bandwidth: {rate} | Under way: 0]>"


def test_what_a_replica_and_its_snapshots_show() -> None:
    replica = Replica(micro_manifest(), 1)
    size = f"{replica.parameters:,} parameters on cpu"
    assert repr(replica) == f"<Replica [Stage: 1 of 2 | {size} | Step: 0 | Round: 0, 0 steps in]>"
    replica.flat.gradients.copy_(torch.ones(replica.parameters))
    replica.inner_step(1)
    assert repr(replica).endswith("Step: 1 | Round: 0, 1 step in]>")
    snapshots = replica.snapshots
    assert repr(snapshots) == "<Snapshots [Copying: nothing | Last: none | Rooms: 0 free]>"
    snapshots.begin(snapshots.room())
    assert repr(snapshots) == "<Snapshots [Copying: step 1, 5 tensors left | Last: none | Rooms: 0 free]>"
    snapshots.advance(1e9, lambda: 0.0)
    snapshots.keep(snapshots.landed())
    assert repr(snapshots) == "<Snapshots [Copying: nothing | Last: step 1, round 0 | Rooms: 0 free]>"


def test_what_a_device_shows() -> None:
    async def main() -> None:
        compute = InlineCompute(lambda _: 0.25)
        assert repr(compute) == "<InlineCompute [Work: 0 waiting, 0 done | A pass: 0.0 ms | idle]>"
        passes = [asyncio.create_task(compute.run(Priority.FORWARD, lambda: None)) for _ in range(3)]
        await asyncio.sleep(0.3)
        assert repr(compute) == "<InlineCompute [Work: 1 waiting, 1 done | A pass: 250.0 ms | busy]>"
        await asyncio.wait(passes)

    run_virtual(main())
