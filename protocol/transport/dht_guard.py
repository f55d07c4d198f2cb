"""A guard in front of hivemind's part of the DHT: what strangers send is bounded before it is parsed or kept.

hivemind trusts who speaks its protocol. Without this, 3 kB of nested extension types end the process, a request that
names a large key many times takes gigabytes, and 320 pings with invented node ids put a stranger between everybody
and the keys of the run. Here

- nothing nests: a value is plain, or one dictionary of sub-keys (`decode`);
- a node id is the hash of the peer id that the connection proves (as in S/Kademlia), in pings and in answers;
- requests name few keys; records and answers of one peer, and of all together, come out of an `Allowance`;
- in a private run requests and answers carry a credential: strangers see no record and are nobody's neighbours;
- nothing is stored as a cache, and signatures are checked a few at a time, so that the event loop stays free.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

import msgpack

from protocol.access.admission import Admission
from protocol.access.peer_limits import Allowance
from protocol.ground import PeerId
from protocol.transport.hivemind_api import (
    DHTID,
    DHTProtocol,
    DictionaryDHTValue,
    P2PContext,
    PeerID,
    ValueWithExpiration,
    dht_pb2,
    hivemind_node,
)

DICTIONARY = 0x50  # hivemind's extension type of a dictionary of sub-keys
MOST_SLOTS = 1 << 14  # in one; 3 MiB of records of a replica are a fifth of that
MOST_KEYS = 16  # in one request for records; peers ask for one
MOST_ENTRIES = 1_024  # in one request to store; a peer that meets a new neighbour sends it every key it holds
ANSWER_BYTES = 7 << 19  # of records in one answer: hivemind's messages end at 4 MiB, and a full key has 3
AT_A_TIME = 16  # signatures checked before others have their turn, 2 ms

Answered = TypeVar("Answered", dht_pb2.PingResponse, dht_pb2.StoreResponse, dht_pb2.FindResponse)
Nearest = dict[DHTID, PeerID]
Found = dict[DHTID, tuple[ValueWithExpiration | None, Nearest]]


class Exceeded(Exception):
    """Too much was asked for. hivemind sends it to who asked; it is not logged."""


def decode(packed: bytes) -> object:
    """Decode what hivemind sends: a plain value, or a dictionary of sub-keys. Raises `ValueError` for anything else.

    hivemind's own way follows extension types within each other by recursion, as deep as the sender wants.
    """
    value = _plain(packed)
    if not isinstance(value, msgpack.ExtType):
        return value
    if value.code != DICTIONARY:
        raise ValueError(f"extension type {value.code} is not used here")
    match _plain(value.data):
        case [_, _, list(items)]:
            return _dictionary(items)
    raise ValueError("not a dictionary of sub-keys")


def _plain(packed: bytes) -> object:
    try:
        return msgpack.unpackb(packed, max_array_len=MOST_SLOTS, max_map_len=0)
    except (TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise ValueError("not msgpack") from error


def _dictionary(items: list[object]) -> DictionaryDHTValue:
    with DictionaryDHTValue().freeze() as slots:  # what has expired is omitted later
        for item in items:
            match item:
                case [str(subkey), bytes(value), float(expires)]:
                    slots.store(subkey, value, expires)
                case _:
                    raise ValueError("a slot has a name, bytes and a time")
        return slots


class Serializer:
    """A serializer in place of hivemind's `MSGPackSerializer`, which writes what `decode` reads."""

    dumps = staticmethod(DHTProtocol.serializer.dumps)
    loads = staticmethod(decode)


def node_id_of(peer: PeerID) -> DHTID:
    """The only node id that a peer may have, so that nobody chooses whose neighbour it is."""
    return DHTID.generate(source=peer.to_base58().encode())


def _named(peer: PeerID) -> PeerId:
    return PeerId(peer.to_base58())


class _Pass:
    """A pass for hivemind, which calls it around each request to one peer of a private run."""

    def __init__(self, admission: Admission, peer: PeerId) -> None:
        self._admission = admission
        self._peer = peer

    async def sign_request(self, request: dht_pb2.FindRequest, _: object) -> None:
        request.auth.nonce = self._admission.own

    async def validate_response(self, response: dht_pb2.FindResponse, _: object) -> bool:
        return self._admission.admits(self._peer, response.auth.nonce)


class GuardedProtocol(DHTProtocol):  # type: ignore[misc] # hivemind has no types
    """hivemind's protocol on the same wire. `validate` is set by whoever makes the node."""

    serializer = Serializer
    validate: Callable[[bytes, object, bytes, float], bool]
    admission: Admission | None = None  # of a private run
    refuses: Callable[[PeerId], Awaitable[bool]]  # ends the connection with a banned peer
    network: Callable[[PeerId], Awaitable[str]]  # that a peer's connection comes from

    def __init__(self, *, _initialized_with_create: bool = False) -> None:
        super().__init__(_initialized_with_create=_initialized_with_create)
        self.records = Allowance(each=(4_096, 64), all_=(16_384, 512))  # to be stored
        self.answered = Allowance(each=(16 << 20, 2 << 20), all_=(64 << 20, 16 << 20))  # bytes
        self._checked = 0  # signatures so far

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        return str(DHTProtocol._get_handle_name(namespace, method_name))

    # --- private runs

    def get_stub(self, peer: PeerID) -> object:
        stub = super().get_stub(peer)
        if self.admission is not None:
            stub._authorizer = _Pass(self.admission, _named(peer))
        return stub

    def _lets_in(self, sender: PeerID, credential: bytes) -> bool:
        if self.admission is None:
            return True
        peer = _named(sender)
        return self.admission.admits(peer, credential) if credential else self.admission.knows(peer)

    def _could_join(self, sender: PeerID, credential: bytes) -> bool:
        """Return whether a peer may store though visitors have all places: its record makes it a member."""
        return self.admission is not None and self.admission.could_join(_named(sender), credential)

    def _show(self, answer: Answered) -> Answered:
        if self.admission is not None:
            answer.auth.nonce = self.admission.own
        return answer

    # --- what others ask

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        """A peer with another's node id is answered as one without any, and so is a stranger.

        Raises `Exceeded` for a banned one.
        """
        if await self.refuses(_named(context.remote_id)):
            raise Exceeded("this peer is not answered for a while")
        is_its_own = request.peer.node_id == node_id_of(context.remote_id).to_bytes()
        if not is_its_own or not self._lets_in(context.remote_id, request.auth.nonce):
            request.peer.node_id = b""
        return self._show(await super().rpc_ping(request, context))

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """Stores records as hivemind does. Raises `Exceeded`, which the sender sees; what was stored before that
        stays.
        """
        entries = [
            request.keys, request.subkeys, request.values, request.expiration_time, request.in_cache
        ]  # fmt: skip
        if len({len(column) for column in entries}) != 1 or len(request.keys) > MOST_ENTRIES:
            raise Exceeded(f"a request stores at most {MOST_ENTRIES} entries")
        await self.rpc_ping(dht_pb2.PingRequest(peer=request.peer, auth=request.auth), context)
        is_in = self._lets_in(context.remote_id, request.auth.nonce) or self._could_join(
            context.remote_id, request.auth.nonce
        )
        network = await self.network(_named(context.remote_id))
        stored = [
            is_in and not in_cache and await self._store(context.remote_id, network, *entry)
            for *entry, in_cache in zip(*entries, strict=True)
        ]
        return self._show(dht_pb2.StoreResponse(store_ok=stored, peer=self.node_info))

    async def _store(
        self, sender: PeerID, network: str, key: bytes, tag: bytes, value: bytes, expires: float
    ) -> bool:
        """Store one record, or a key's dictionary of them; return whether all of it is here now."""
        if tag == self.IS_REGULAR_VALUE:
            return False  # it would belong to nobody
        if tag != self.IS_DICTIONARY:
            return await self._store_record(sender, network, key, decode(tag), value, expires)
        slots = decode(value)
        if not isinstance(slots, DictionaryDHTValue):
            return False
        with slots.freeze():
            records = [(subkey, *entry) for subkey, entry in slots.items()]
        return all([await self._store_record(sender, network, key, *record) for record in records])

    async def _store_record(
        self, sender: PeerID, network: str, key: bytes, subkey: object, value: bytes, expires: float
    ) -> bool:
        wanted = DHTID.from_bytes(key)
        if not isinstance(subkey, str):
            return False
        if not self.storage.wants(wanted, subkey, expires):
            return bool(self.storage.holds(wanted, subkey, value))  # no signature is checked for it
        if not self.records.take(sender, 1, time.monotonic()):
            raise Exceeded("too many records in a short time")
        self._checked += 1
        if self._checked % AT_A_TIME == 0:
            await asyncio.sleep(0)
        if not self.validate(key, subkey, value, expires):
            return False
        return bool(self.storage.store_subkey(wanted, subkey, value, expires, network))

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """Answers a search as hivemind does; records beyond `ANSWER_BYTES` or the allowance are left out. Raises
        `Exceeded`.

        A stranger to a private run finds nothing and nobody.
        """
        keys = list(dict.fromkeys(request.keys))
        if await self.refuses(_named(context.remote_id)):
            raise Exceeded("this peer is not answered for a while")
        if len(request.keys) > MOST_KEYS or len(keys) != len(request.keys):
            raise Exceeded(f"a request names at most {MOST_KEYS} keys, each once")
        answer = self._show(dht_pb2.FindResponse(results=[], peer=self.node_info))
        if not self._lets_in(context.remote_id, request.auth.nonce):
            answer.results.extend(dht_pb2.FindResult(type=dht_pb2.NOT_FOUND) for _ in keys)
            return answer
        left = ANSWER_BYTES
        asker = request.peer
        for key in keys:
            one = await super().rpc_find(dht_pb2.FindRequest(keys=[key], peer=asker), context)
            (result,) = one.results
            if not self._may_answer(context.remote_id, len(result.value), left):
                result = dht_pb2.FindResult(
                    type=dht_pb2.NOT_FOUND,
                    nearest_node_ids=result.nearest_node_ids,
                    nearest_peer_ids=result.nearest_peer_ids,
                )
            left -= len(result.value)
            answer.results.append(result)
            asker = dht_pb2.NodeInfo()  # it has been greeted
        return answer

    def _may_answer(self, asker: PeerID, nbytes: int, left: int) -> bool:
        return not nbytes or (nbytes <= left and self.answered.take(asker, nbytes, time.monotonic()))

    # --- what others answer

    async def call_find(self, peer: PeerID, keys: Collection[DHTID]) -> Found | None:
        """Searches as hivemind does, with as many neighbours as it would name itself, under their own node ids."""
        found: Found | None = await super().call_find(peer, keys)
        if found is None:
            return None
        return {key: (value, self._true_neighbours(nearest)) for key, (value, nearest) in found.items()}

    def _true_neighbours(self, nearest: Nearest) -> Nearest:
        named = itertools.islice(nearest.items(), self.bucket_size)
        return {node_id: peer for node_id, peer in named if node_id == node_id_of(peer)}

    def _validate_dictionary(self, key_bytes: bytes, dictionary: object) -> bool:
        """Accepts the dictionary of an answer as it is: who searches looks at each record, a few at a time."""
        return isinstance(dictionary, DictionaryDHTValue)

    async def update_routing_table(
        self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True
    ) -> None:
        """Take up no strangers and no foreign node ids; also called with the ids of those who answer."""
        is_in = not responded or self.admission is None or self.admission.knows(_named(peer_id))
        if is_in and (node_id is None or node_id == node_id_of(peer_id)):
            await super().update_routing_table(node_id, peer_id, responded)


# `DHTNode` makes its protocol itself, of the class that has this name in its module
hivemind_node.DHTProtocol = GuardedProtocol
