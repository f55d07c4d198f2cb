"""Records in hivemind's DHT: joining it, storing and searching, each with a deadline.

What this peer accepts from, and keeps for, the DHT are only records in the format of `protocol.records.records`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import lru_cache
from typing import TypeVar

from protocol.access.admission import Admission
from protocol.errors import RecordError
from protocol.ground import PeerId, Record
from protocol.records.records import (
    CLOCK_SLACK,
    MAX_RECORD_BYTES,
    authenticate,
    check_lifetime,
    key_digest,
)
from protocol.supervision import Supervisor, Work, all_of
from protocol.transport.dht_guard import AT_A_TIME, GuardedProtocol, Serializer, decode
from protocol.transport.dht_storage import RecordStorage
from protocol.transport.hivemind_api import (
    DHTID,
    P2P,
    DHTNode,
    DHTRecord,
    DictionaryDHTValue,
    PeerID,
    RecordValidatorBase,
    traverse_dht,
)
from protocol.windows import counted, window

T = TypeVar("T")

_RPC_TIMEOUT = 3.0  # seconds after which one member counts as silent; hivemind's default
MOST_BAD = 64  # records of one answer that are over, or were never good
ENOUGH_RECORDS = (
    32  # of a key with so many of them the copies of a few holders are enough, else all are united
)
_GREETED = 8  # connected peers, when nobody else answers
_PACKING = 5  # bytes before a value
_REMEMBERED = 2048  # records whose signature was checked; each search brings the same ones from several peers


async def nobody(peer: PeerId) -> bool:
    """Refuse no peer."""
    return False


async def nowhere(peer: PeerId) -> str:
    """Return no network."""
    return ""


class Dht:
    """This peer's part of the DHT. Dies with its p2pd; make a new one then."""

    def __init__(
        self, node: DHTNode, client_only: bool, now: Callable[[], float], supervisor: Supervisor
    ) -> None:
        self._node = node
        self._now = now
        self._client_only = client_only
        self._supervisor = supervisor

    @window
    def __repr__(self) -> str:
        protocol = self._node.protocol
        kind = "client" if self._client_only else "server"
        table = counted(len(protocol.routing_table.uid_to_peer_id), "peer")
        return f"{kind} | Routing table: {table} | Storage: {protocol.storage!r}"

    @property
    def _guarded(self) -> GuardedProtocol:
        """What answers other peers, by its type: hivemind says none."""
        protocol: GuardedProtocol = self._node.protocol
        return protocol

    def neighbours(self) -> list[PeerId]:
        """The peers in the routing table, each as often as it is there with a node id."""
        return [
            PeerId(peer.to_base58()) for peer in self._node.protocol.routing_table.uid_to_peer_id.values()
        ]

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
        guarded = node.protocol
        assert isinstance(guarded, GuardedProtocol)
        guarded.storage, guarded.cache = RecordStorage(now), RecordStorage(now)
        guarded.validate, guarded.refuses, guarded.network = validator.accepts, nobody, nowhere
        return cls(node, client_only, now, supervisor)

    def restrict(self, admission: Admission) -> None:
        """See `Transport.restrict`; who was asked in vain before may be asked again."""
        guarded = self._guarded
        guarded.record_validator.admission = guarded.admission = admission
        self._node.blacklist.clear()

    def refuse_by(self, refuses: Callable[[PeerId], Awaitable[bool]]) -> None:
        """Answer no peer any more for which `refuses` says so."""
        self._guarded.refuses = refuses

    def locate_by(self, network: Callable[[PeerId], Awaitable[str]]) -> None:
        """Share the room for records by the networks that peers store from."""
        self._guarded.network = network

    async def greet(self, peer: PeerId) -> bool:
        """Make a connected peer known to the routing table, and this peer to its; return whether it answered.

        Takes 3 s at most. A clock that is more than 3 s off is only logged here.
        """
        ping = self._node.protocol.call_ping
        return await ping(PeerID.from_base58(peer), validate=not self._client_only, strict=False) is not None

    async def explore(self, deadline: float) -> bool:
        """Fill the routing table with the neighbours of this peer; False when that goes on after the deadline."""
        search = self._node.find_nearest_nodes([self._node.node_id])
        return await self._within(deadline, search, "looking for neighbours") is not None

    async def put(self, key: str, sealed: bytes, peer: PeerId, expires: float, deadline: float) -> bool:
        """Store a record; return whether a member did in time. The rest is then still being asked or has refused."""
        storing = self._store(key_digest(key), sealed, peer, expires)
        return bool(await self._within(deadline, storing, "storing a record"))

    async def _store(self, digest: bytes, sealed: bytes, peer: PeerId, expires: float) -> bool:
        """hivemind's `store`, except that nobody sends what is under the key already.

        It asks those who are near a key for the key; here they are asked for its neighbour, which nobody stores.
        """
        node, wanted = self._node, DHTID.from_bytes(digest)
        beside = DHTID(int(wanted) ^ 1)
        found = await node.find_nearest_nodes([beside], exclude_self=self._client_only)
        nearest, packed, stored = list(found[beside].items()), Serializer.dumps(sealed), 0

        async def store(node_id: DHTID, holder: PeerID) -> bool:
            if node_id == node.node_id:
                return bool(node.protocol.storage.store_subkey(wanted, peer, packed, expires))
            answer = await node.protocol.call_store(holder, [wanted], [packed], [expires], [peer])
            return bool(answer) and bool(answer[0])

        while nearest and stored < node.num_replicas:
            tried = [nearest.pop(0) for _ in range(min(len(nearest), node.num_replicas - stored))]
            stored += sum(await all_of(*(store(node_id, holder) for node_id, holder in tried)))
        return stored > 0

    async def get(self, key: str, deadline: float, copies: int) -> list[Record]:
        """Valid records, sorted by peer id: all that were found when the search or the time was over."""
        found: dict[PeerId, Record] = {}
        # members that do not answer take 3 s each; what the others had is in `found` all the same
        ends = asyncio.get_running_loop().time() + deadline
        search = self._search(key_digest(key), found, copies)
        answers = await self._within(deadline, search, "searching for records")
        if answers == 0:
            left = ends - asyncio.get_running_loop().time()
            await self._within(left, self._greet_connected(), "greeting who is connected")
        now = self._now()
        return [found[peer] for peer in sorted(found) if found[peer].expires > now]

    async def _within(self, deadline: float, work: Work[T], name: str) -> T | None:
        """The result of `work`, or None after `deadline` seconds: it then ends by itself, as its requests run out.

        hivemind's searches leave tasks behind when they are cancelled, which asyncio complains of on the screen.
        """
        task = self._supervisor.start(work, name)
        await asyncio.wait([task], timeout=max(0.0, deadline))
        return task.result() if task.done() else None

    async def _greet_connected(self) -> None:
        """Greet peers for the next search to find: hivemind forgets who was silent once, be it the only one known."""
        connected = [info.peer_id for info in await self._node.protocol.p2p.list_peers()][:_GREETED]
        answered = await all_of(*(self.greet(peer.to_base58()) for peer in connected))
        for peer in itertools.compress(connected, answered):
            self._node.blacklist.register_success(peer)

    async def _search(self, digest: bytes, found: dict[PeerId, Record], copies: int) -> int:
        """hivemind's `get`, except that what is found is there at once, and that it ends with enough of a large key.

        One copy is that of either of the two nearest, so that whoever sits nearest hides the key from half of those
        who look. How many members answered.
        """
        node, wanted, answers, holders = self._node, DHTID.from_bytes(digest), 0, 0
        own = node.protocol.storage.get(wanted)
        if own is not None:
            await self._collect(digest, own.value, found)
        nearest, size = node.protocol.routing_table.get_nearest_neighbors, node.protocol.bucket_size
        peer_of = dict(nearest(wanted, size, exclude=node.node_id))

        async def ask(member: DHTID, queries: Collection[DHTID]) -> dict[DHTID, tuple[Sequence[DHTID], bool]]:
            nonlocal answers, holders
            answer = await node._call_find_with_blacklist(peer_of[member], [wanted])
            answers += answer is not None
            value, neighbours = answer[wanted] if answer else (None, {})
            if value is not None:
                await self._collect(digest, value.value, found)
                holders += 1
            peer_of.update(neighbours)
            return {wanted: (tuple(neighbours), has_enough())}

        def has_enough() -> bool:
            return holders >= copies and len(found) >= ENOUGH_RECORDS

        first = list(peer_of)[: max(copies, 2)]
        first = random.sample(first, min(copies, len(first)))
        await all_of(*(ask(member, [wanted]) for member in first))
        if has_enough():
            return answers
        await traverse_dht(
            queries=[wanted],
            initial_nodes=[member for member in peer_of if member not in first],
            beam_size=size,
            num_workers=1 if copies == 1 else node.num_workers,  # those asked at once all send theirs
            queries_per_call=1,
            get_neighbors=ask,
            visited_nodes={wanted: {node.node_id, *first}},
        )
        return answers

    async def _collect(self, digest: bytes, slots: object, found: dict[PeerId, Record]) -> None:
        """Take the good ones; others have their turn meanwhile. Who sends many bad ones is not listened to."""
        if not isinstance(slots, DictionaryDHTValue):
            return
        with slots.freeze():
            entries = [(subkey, *entry) for subkey, entry in slots.items()]
        bad = 0
        for number, (subkey, packed, expires) in enumerate(entries):
            if number % AT_A_TIME == AT_A_TIME - 1:
                await asyncio.sleep(0)
            try:
                record = self._node.protocol.record_validator.open(digest, subkey, packed, expires)
            except RecordError:
                bad += 1  # own storage may hold records that have expired since
                if bad > MOST_BAD:
                    return
                continue
            if record.subkey not in found or found[record.subkey].expires < expires:
                found[record.subkey] = record


class RecordValidator(RecordValidatorBase):  # type: ignore[misc] # hivemind has no types
    """Validates, for hivemind, each record that it stores for others, stores for itself, or finds."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self.admission: Admission | None = None
        self._authenticate = lru_cache(_REMEMBERED)(authenticate)

    def validate(self, record: DHTRecord) -> bool:
        """Return False for anything bad, plain values without a sub-key included. Never raises."""
        try:
            subkey = decode(record.subkey)
        except ValueError:
            return False
        return self.accepts(record.key, subkey, record.value, record.expiration_time)

    def accepts(self, digest: bytes, subkey: object, packed: bytes, expires: float) -> bool:
        """Return whether a record, given in its parts, may be stored here."""
        try:
            self.open(digest, subkey, packed, expires)
        except RecordError:
            return False
        return True

    def open(self, digest: bytes, subkey: object, packed: bytes, expires: float) -> Record:
        """Check a value as the DHT holds it, a sealed record packed once more. Raises `RecordError`.

        hivemind throws away a peer's whole answer when one record in it is invalid. Since clocks differ, and
        an answer may hold a record that expired a moment ago, such a record passes here; `get` omits it.
        """
        if len(packed) > MAX_RECORD_BYTES + _PACKING:
            raise RecordError(f"the value has {len(packed)} bytes")
        try:
            sealed = decode(packed)
        except ValueError as error:
            raise RecordError("the value is not msgpack") from error
        if not isinstance(subkey, str) or not isinstance(sealed, bytes):
            raise RecordError("not a record in the slot of a peer")
        now = self._now()
        check_lifetime(expires, now if expires > now else now - CLOCK_SLACK)
        record = self._authenticate(digest, subkey, sealed, expires)
        if self.admission is not None:
            self.admission.check(record.subkey, record.credential, takes_part=True)
        return record
