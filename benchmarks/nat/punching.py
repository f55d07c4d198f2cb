"""How two peers behind home routers meet: directly, or through the peer between, in network namespaces.

    sudo .venv/bin/python benchmarks/nat/punching.py --pairs cone+cone,cone+random --tries 5

Needs root, iproute2, nftables. The transport alone, real p2pd: a public peer at 11.0.0.1 passes streams on; the near
and the far one each have a router of their own and know from the start that they are hidden. The near one opens a
stream and asks again and again; a try ends once there is a direct connection, or after 20 s. Prints a line for each
try, then JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from namespaces import HOMES, Network

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 20.0  # seconds from the first answer through the peer between
ECHO = "/benchmark/echo/1"


@dataclass
class Speaker:
    """One peer of a try, a process that answers a line of JSON with another."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls, space: str, *arguments: str) -> Speaker:
        command = ["ip", "netns", "exec", space, sys.executable, __file__, "--peer", *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        return cls(subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True))

    def ask(self, **order: object) -> dict[str, object]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, object]:
        assert self.process.stdout is not None
        found: dict[str, object] = json.loads(self.process.stdout.readline())
        return found

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(8)
        except subprocess.TimeoutExpired:
            self.process.kill()


def tried(public: str, homes: list[str], number: int, folder: Path) -> dict[str, object]:
    """One try, with new peers and new ports."""
    port, spaces = str(4_001 + number), [public, *homes]
    for name in ("between", "near", "far"):
        (folder / f"{name}{number}").mkdir()
    peers = [
        Speaker.start(space, port, str(folder / f"{name}{number}"))
        for space, name in zip(spaces, ("between", "near", "far"), strict=True)
    ]
    try:
        between, near, far = peers
        ids = [str(peer.answer()["peer"]) for peer in peers]
        for peer in (near, far):
            peer.ask(do="connect", address=f"/ip4/11.0.0.1/tcp/{port}/p2p/{ids[0]}")
        between.ask(do="willing", peers=ids[1:])
        near.ask(do="hidden", other=ids[2], between=ids[0])
        far.ask(do="hidden", other=ids[1], between=ids[0])
        found = near.ask(do="meet", peer=ids[2])
        return found | {"passed_on": between.ask(do="passed_on")["bytes"]}
    finally:
        for peer in peers:
            peer.end()


async def speak(port: int, folder: Path) -> None:
    """Be one peer: answer the lines on standard input until it ends."""
    from protocol.records.identity import Identity
    from protocol.transport.base import Stream
    from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport
    from protocol.transport.relayed_stream import RelayedStream

    Identity.generate().save(folder / "identity")
    transport = Libp2pTransport(folder / "identity", Libp2pConfig(host="0.0.0.0", port=port))

    async def echo(stream: Stream) -> None:
        while True:
            await stream.write(await stream.read(1_000))

    async def meet(order: dict[str, str]) -> dict[str, object]:
        clock, peer, began, answers = asyncio.get_running_loop().time, order["peer"], None, 0
        while began is None or clock() - began < PATIENCE:
            stream = await transport.open(peer, ECHO, 10.0)  # type: ignore[arg-type]
            await stream.write(bytes(1_000))
            await stream.read(1_000)
            answers, began = answers + 1, clock() if began is None else began
            is_relayed = isinstance(stream, RelayedStream)
            if not is_relayed:
                stream.close()
                way = (await transport.remotes()).get(peer, [""])[0]  # type: ignore[call-overload]
                return {"direct": True, "seconds": round(clock() - began, 1), "at": way, "answers": answers}
            await asyncio.sleep(0.2)
            if answers > 1:
                stream.close()
        return {"direct": False, "seconds": PATIENCE, "answers": answers}

    async def done(order: dict[str, object]) -> dict[str, object]:
        match order["do"]:
            case "connect":
                return {"answered": await transport.connect([str(order["address"])], 15.0)}
            case "willing":
                transport.pass_on(1e7)
                return {"kept": [transport.keep_way_to(peer) for peer in order["peers"]]}  # type: ignore[attr-defined]
            case "hidden":
                transport.is_hidden, transport.ways_in = True, (order["between"],)  # type: ignore[assignment]
                transport.learn_ways(order["other"], [order["between"]])  # type: ignore[arg-type, list-item]
                return {}
            case "meet":
                return await meet(order)  # type: ignore[arg-type]
            case "passed_on":
                return {"bytes": transport.passed_on}
        raise AssertionError(order)

    await transport.start()
    await transport.serve(ECHO, echo)
    print(json.dumps({"peer": transport.peer_id}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await done(json.loads(line))), flush=True)
    await transport.close()


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        port, folder = sys.argv[2:]
        asyncio.run(speak(int(port), Path(folder)))
        return
    kinds = ", ".join(HOMES)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", default="cone+cone", help=f"routers of the two, near+far, of: {kinds}")
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--prefix", default="np", help="of the names of namespaces")
    options = parser.parse_args()
    rows: dict[str, list[dict[str, object]]] = {}
    for pair in options.pairs.split(","):
        network = Network(options.prefix)
        with tempfile.TemporaryDirectory(prefix="noloco-punching-") as folder:
            try:
                network.begin()
                public = network.public("s", "11.0.0.1")
                homes = [network.home(number + 1, kind) for number, kind in enumerate(pair.split("+"))]
                for number in range(options.tries):
                    began = time.monotonic()
                    found = tried(public, homes, number, Path(folder))
                    rows.setdefault(pair, []).append(found)
                    print(f"{pair}: {found} ({time.monotonic() - began:.0f} s)", flush=True)
            finally:
                network.end()
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
