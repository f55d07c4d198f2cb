"""Records in hivemind's DHT: joining it, storing and searching, each with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

from protocol.errors import RecordError
from protocol.records import key_digest
from protocol.supervision import Supervisor
from protocol.transport.base import PeerId, Record
from protocol.transport.dht_validator import RecordStorage, RecordValidator
from protocol.transport.hivemind_api import DHTID, DHTNode, DictionaryDHTValue, PeerID, traverse_dht

T = TypeVar("T")

_RPC_TIMEOUT = 3.0  # seconds after which one member counts as silent; hivemind's default


class Dht:
    """This peer's part of the DHT. Dies with its p2pd; make a new one then."""

    def __init__(
        self,
        node: Any,
        client_only: bool,
        validator: RecordValidator,
        now: Callable[[], float],
        supervisor: Supervisor,
    ) -> None:
        self._node = node
        self._now = now
        self._client_only = client_only
        self._validator = validator
        self._supervisor = supervisor

    @classmethod
    async def create(
        cls, p2p: Any, peer: PeerId, client_only: bool, now: Callable[[], float], supervisor: Supervisor
    ) -> Dht:
        """A DHT of one, until `join` meets others. The node id follows from the peer id, so that a peer that
        restarts is found where it was."""
        validator = RecordValidator(now)
        node = await DHTNode.create(
            p2p=p2p,
            node_id=DHTID.generate(source=peer.encode()),
            client_mode=client_only,
            record_validator=validator,
            wait_timeout=_RPC_TIMEOUT,
            # searches always ask for the newest records, to which caches add nothing but traffic
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
        )
        node.protocol.storage = RecordStorage(now)
        node.protocol.cache = RecordStorage(now)
        return cls(node, client_only, validator, now, supervisor)

    async def greet(self, peer: PeerId) -> bool:
        """Make a connected peer known to the routing table, and this peer to its; whether it answered.

        Takes 3 s at most. A clock that is more than 3 s off is only logged here.
        """
        known = await self._node.protocol.call_ping(
            PeerID.from_base58(peer), validate=not self._client_only, strict=False
        )
        return known is not None

    async def explore(self, deadline: float) -> bool:
        """Fill the routing table with the neighbours of this peer; False when that goes on after the deadline."""
        search = self._node.find_nearest_nodes([self._node.node_id])
        return await self._within(deadline, search, "looking for neighbours") is not None

    async def put(self, key: str, sealed: bytes, peer: PeerId, expires: float, deadline: float) -> bool:
        """Whether some member stored it in time; the rest is then still being asked or has refused."""
        storing = self._node.store(key.encode(), sealed, expires, subkey=peer, exclude_self=self._client_only)
        return bool(await self._within(deadline, storing, "storing a record"))

    async def get(self, key: str, deadline: float) -> list[Record]:
        """Valid records, sorted by peer id: all that were found when the search or the time was over."""
        found: dict[PeerId, Record] = {}
        # members that do not answer take 3 s each; what the others had is in `found` all the same
        await self._within(deadline, self._search(key_digest(key), found), "searching for records")
        now = self._now()
        return [found[peer] for peer in sorted(found) if found[peer].expires > now]

    async def _within(self, deadline: float, work: Coroutine[Any, Any, T], name: str) -> T | None:
        """The result of `work`, or None after `deadline` seconds: it then ends by itself, as its requests run out.

        hivemind's searches leave tasks behind when they are cancelled, which asyncio complains of on the screen.
        """
        task = self._supervisor.start(work, name)
        await asyncio.wait([task], timeout=max(0.0, deadline))
        return task.result() if task.done() else None

    async def _search(self, digest: bytes, found: dict[PeerId, Record]) -> None:
        """hivemind's `get`, except that what is found is there at once."""
        node, wanted = self._node, DHTID.from_bytes(digest)
        own = node.protocol.storage.get(wanted)
        if own is not None:
            self._collect(digest, own.value, found)
        near = node.protocol.routing_table.get_nearest_neighbors(
            wanted, node.protocol.bucket_size, exclude=node.node_id
        )
        peer_of = dict(near)

        async def ask(
            member: DHTID, queries: Collection[DHTID]
        ) -> dict[DHTID, tuple[tuple[DHTID, ...], bool]]:
            answer = await node._call_find_with_blacklist(peer_of[member], [wanted])
            value, neighbours = answer[wanted] if answer else (None, {})
            if value is not None:
                self._collect(digest, value.value, found)
            peer_of.update(neighbours)
            return {wanted: (tuple(neighbours), False)}

        await traverse_dht(
            queries=[wanted],
            initial_nodes=list(peer_of),
            beam_size=node.protocol.bucket_size,
            num_workers=node.num_workers,
            queries_per_call=1,
            get_neighbors=ask,
            visited_nodes={wanted: {node.node_id}},
        )

    def _collect(self, digest: bytes, slots: object, found: dict[PeerId, Record]) -> None:
        if not isinstance(slots, DictionaryDHTValue):
            return
        with slots.freeze():  # the sender chose its size limit; it must not be applied
            entries = [(subkey, *entry) for subkey, entry in slots.items()]
        for subkey, packed, expires in entries:
            try:
                record = self._validator.open(digest, subkey, packed, expires)
            except RecordError:
                continue  # own storage may hold records that have expired since
            if record.subkey not in found or found[record.subkey].expires < expires:
                found[record.subkey] = record
