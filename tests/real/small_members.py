"""Members of a run that train nothing, several in one process: they greet, dial back, and answer probes.

python small_members.py HOST COUNT: prints an address of each at HOST, and serves.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from node.links.probing import probe_digest
from node.membership.joining import serve_greeting
from protocol.messages.peers import Probe, Probed
from protocol.records.identity import Identity
from protocol.rpc.rpc import Answer, Request, Rpc, Traffic
from protocol.run.manifest import load_preset
from protocol.run.signed_manifest import SignedManifest
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport


async def on_probe(request: Request[Probe]) -> Answer[Probed]:
    return Answer(Probed(digest=probe_digest(request.message.nonce, request.frame.payload)))


async def member(path: Path, signed: SignedManifest) -> Libp2pTransport:
    Identity.load_or_create(path)
    transport = Libp2pTransport(path, Libp2pConfig(host="0.0.0.0"))
    rpc = Rpc(transport)
    await transport.start()
    await rpc.start()
    serve_greeting(rpc, transport, signed, is_seed=False)
    for traffic in (Traffic.CONTROL, Traffic.STATE):
        rpc.handle(Probe.answered_by(on_probe, traffic))
    return transport


async def main(host: str, count: int) -> None:
    signed = SignedManifest.sign(load_preset("tiny"), Identity.from_seed("owner"))
    with TemporaryDirectory() as directory:
        members = [await member(Path(directory) / f"{number}.key", signed) for number in range(count)]
        try:
            for one in members[1:]:
                await one.connect(members[0].addresses()[:1], 15.0)
            for one in members:
                print(*(a for a in one.addresses() if a.startswith(f"/ip4/{host}/")), flush=True)
            await asyncio.Event().wait()
        finally:
            for one in members:
                await one.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
