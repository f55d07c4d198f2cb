"""Records in hivemind's DHT: joining it, storing and searching, each with a deadline.

What this peer accepts from, and keeps for, the DHT are only records in the format of `protocol.records`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import TypeVar

import msgpack

from protocol.errors import RecordError
from protocol.records import CLOCK_SLACK, authenticate, check_lifetime, is_in_reach, key_digest
from protocol.supervision import Supervisor, Work
from protocol.transport.base import PeerId, Record
from protocol.transport.hivemind_api import (
    DHTID,
    P2P,
    DHTLocalStorage,
    DHTNode,
    DHTRecord,
    DictionaryDHTValue,
    PeerID,
    RecordValidatorBase,
    traverse_dht,
)

T = TypeVar("T")

_RPC_TIMEOUT = 3.0  # seconds after which one member counts as silent; hivemind's default
MAX_KEY_BYTES = 3 << 20  # a key's records travel in one message, and hivemind's end at 4 MiB
MAX_STORE_BYTES = 256 << 20  # strangers decide what is stored here; their records must not take all memory
_REMEMBERED = 2048  # records whose signature was checked; each search brings the same ones from several peers


class Dht:
    """This peer's part of the DHT. Dies with its p2pd; make a new one then."""

    def __init__(
        self,
        node: DHTNode,
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
        cls, p2p: P2P, peer: PeerId, client_only: bool, now: Callable[[], float], supervisor: Supervisor
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

    async def _within(self, deadline: float, work: Work[T], name: str) -> T | None:
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


class RecordValidator(RecordValidatorBase):  # type: ignore[misc] # hivemind has no types
    """Called by hivemind for each record that it stores for others, stores for itself, or finds."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._authenticate = lru_cache(_REMEMBERED)(authenticate)

    def validate(self, record: DHTRecord) -> bool:
        """False for anything bad, plain values without a sub-key included. Never raises."""
        try:
            subkey = msgpack.unpackb(record.subkey)
        except (ValueError, TypeError, msgpack.UnpackException):
            return False
        try:
            self.open(record.key, subkey, record.value, record.expiration_time)
        except RecordError:
            return False
        return True

    def open(self, digest: bytes, subkey: object, packed: bytes, expires: float) -> Record:
        """Check a value as the DHT holds it, a sealed record packed once more. Raises `RecordError`.

        hivemind throws away a peer's whole answer when one record in it is invalid. Since clocks differ, and
        an answer may hold a record that expired a moment ago, such a record passes here; `get` omits it.
        """
        try:
            sealed = msgpack.unpackb(packed)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise RecordError("the value is not msgpack") from error
        if not isinstance(subkey, str) or not isinstance(sealed, bytes):
            raise RecordError("not a record in the slot of a peer")
        now = self._now()
        check_lifetime(expires, now if expires > now else now - CLOCK_SLACK)
        return self._authenticate(digest, subkey, sealed, expires)


class RecordStorage(DHTLocalStorage):  # type: ignore[misc] # hivemind has no types
    """hivemind's storage, bounded, and without two ways in which a record disappears before its time.

    In hivemind, a replayed older record is refused but shortens the life of the newer one; and a key's
    dictionary is dropped early once a search has merged a longer-lived record into it. A record that reaches too
    far, stored while this machine's clock was ahead, gives way: other peers refuse every answer that has it in it.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        super().__init__()
        self._now = now
        self._bytes_at_most = 0  # grows with every store; counted again when it reaches the limit

    def store_subkey(self, key: DHTID, subkey: str, value: bytes, expiration_time: float) -> bool:
        held = self.get(key)
        slots = DictionaryDHTValue() if held is None else held.value
        if not isinstance(slots, DictionaryDHTValue):
            return False
        current = slots.get(subkey)
        if current is not None and not is_in_reach(current.expiration_time, self._now()):
            del slots[subkey]
            current = None
        if current is not None and current.expiration_time >= expiration_time:
            return False
        growth = len(value) - (len(current.value) if current is not None else 0)
        if growth > 0 and (_size(slots) + growth > MAX_KEY_BYTES or self._full(growth)):
            return False
        if not slots.store(subkey, value, expiration_time):
            return False
        if held is None or expiration_time > held.expiration_time:
            self.store(key, slots, expiration_time)
        return True

    def _full(self, more: int) -> bool:
        self._bytes_at_most += more
        if self._bytes_at_most > MAX_STORE_BYTES:
            self._bytes_at_most = sum(_size(item.value) for _, item in self.items()) + more
        return self._bytes_at_most > MAX_STORE_BYTES


def _size(slots: DictionaryDHTValue) -> int:
    return sum(len(entry.value) for _, entry in slots.items())
