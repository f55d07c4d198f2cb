"""A peer that looks at a run for some seconds under a key of its own: whom it finds, and how fast their links are."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from node.links.links import Links
from node.links.probing import Visitor
from node.membership.discovery import read_stages
from node.membership.joining import payload_limits
from node.membership.view import View
from protocol.files.folders import temporary_folder
from protocol.ground import PeerId
from protocol.messages.peers import Introduce
from protocol.records.announcement import Announcement, LinkReport, stage_key
from protocol.records.identity import Identity
from protocol.records.records import seal_record
from protocol.rpc.rpc import Rpc
from protocol.run.signed_manifest import SignedManifest
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport

MOST_MEASURED = 3
RECORD_SECONDS = 300.0


@asynccontextmanager
async def passing_peer(config: Libp2pConfig) -> AsyncIterator[tuple[Rpc, Identity]]:
    """A peer under a key of its own, gone when the context ends.

    Raises `UserError` when p2pd does not start, or the folder for temporary files cannot be written.
    """
    with temporary_folder("noloco-passing-") as directory:
        path = directory / "identity.key"
        key = Identity.load_or_create(path)
        transport = Libp2pTransport(path, config)
        rpc = Rpc(transport)
        try:
            await transport.start()
            await rpc.start()
            yield rpc, key
        finally:
            await rpc.close()
            await transport.close()


async def members_of(
    rpc: Rpc, signed: SignedManifest, reached: Sequence[PeerId]
) -> tuple[View, list[PeerId]]:
    """Some of the run's nodes by its records, and the peers to ask: the nodes, then those `reached`."""
    view, transport, run_id = View(), rpc.transport, signed.run_id
    stages = range(signed.manifest.stages)
    rpc.limit(payload_limits(signed.manifest))
    await read_stages(transport, run_id, stages, view)
    nodes = [peer for stage in stages for peer in view.serving(stage, transport.now())]
    return view, list(dict.fromkeys([*nodes, *reached]))


async def measured_links(
    rpc: Rpc, key: Identity, signed: SignedManifest, members: Sequence[PeerId]
) -> list[LinkReport]:
    """Measure what can be sent to some members: they answer whoever shows a record, and this one says that it leaves.

    Deadlines are those of `Visitor.visit`, one member after another; who does not answer is left out.
    """
    now = rpc.transport.now()
    record = Announcement(stage=0, state="leaving", since=now).to_bytes()
    sealed = seal_record(key, stage_key(signed.run_id, 0), record, now + RECORD_SECONDS)
    shown = rpc.introduction.credential if rpc.introduction is not None else b""  # of a private run
    expires = now + RECORD_SECONDS
    rpc.introduction = Introduce(stage=0, record=sealed, expires=expires, credential=shown)
    links = Links()
    visitor = Visitor(rpc, links, random.Random())
    for peer in members[:MOST_MEASURED]:
        await visitor.visit(peer)
    return links.told()
