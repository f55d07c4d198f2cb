"""Requests to a running p2pd over its control socket: one short-lived connection for each request.

hivemind's own client leaves these connections open when a request fails or is cancelled, and waits for ever
when p2pd does not answer. Here each request closes what it opened and ends by its deadline.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from protocol.addresses import without_peer
from protocol.errors import DeadlineExceeded, PeerUnreachable, TransportDown
from protocol.transport.base import PeerId
from protocol.transport.hivemind_api import Multiaddr, PeerID, p2pd_pb2, read_pbmsg_safe, write_pbmsg
from protocol.transport.p2pd_socket import P2pdSocket


class P2pdControl:
    """Every method raises `PeerUnreachable` when p2pd could not do it, `DeadlineExceeded` when it is slow, and
    `TransportDown` when it is gone."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    async def identify(self, deadline: float) -> list[str]:
        """The addresses under which p2pd believes that others reach it, without /p2p/<peer id>."""
        answer = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY), deadline)
        return _texts(answer.identify.addrs)

    async def connect(self, address: str, peer: PeerId, deadline: float) -> None:
        """Dial one address (already checked) and make sure that `peer` answers there."""
        request = p2pd_pb2.ConnectRequest(
            peer=_raw(peer), addrs=[Multiaddr(without_peer(address)).to_bytes()], timeout=math.ceil(deadline)
        )
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=request), deadline)

    async def list_peers(self, deadline: float) -> list[PeerId]:
        """The peers connected at present, sorted."""
        answer = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), deadline)
        return sorted(PeerId(PeerID(info.id).to_base58()) for info in answer.peers)

    async def remote_addresses(self, peer: PeerId, deadline: float) -> list[str]:
        """Where the connections with `peer` lead to or come from; none when it is not connected."""
        answer = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), deadline)
        places = [_texts(info.addrs) for info in answer.peers if info.id == _raw(peer)]
        return [address for addresses in places for address in addresses]

    async def find_peer(self, peer: PeerId, deadline: float) -> list[str]:
        """The addresses at which `peer` says that it listens."""
        request = p2pd_pb2.DHTRequest(
            type=p2pd_pb2.DHTRequest.FIND_PEER, peer=_raw(peer), timeout=math.ceil(deadline)
        )
        answer = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.DHT, dht=request), deadline)
        return _texts(answer.dht.peer.addrs)

    async def serve_streams(self, protocol: str, listener: Path, deadline: float) -> None:
        """Have p2pd connect to the socket `listener` for every incoming stream of `protocol`."""
        request = p2pd_pb2.StreamHandlerRequest(
            addr=Multiaddr(f"/unix{listener}").to_bytes(), proto=[protocol], balanced=False
        )
        await self._ask(
            p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=request), deadline
        )

    async def open_stream(self, peer: PeerId, protocol: str, deadline: float) -> P2pdSocket:
        """A connection that carries the new stream; the caller closes it."""
        request = p2pd_pb2.StreamOpenRequest(peer=_raw(peer), proto=[protocol], timeout=math.ceil(deadline))
        async with _converted_errors(deadline):
            _, connection = await asyncio.get_running_loop().create_unix_connection(
                P2pdSocket, str(self._socket)
            )
            try:
                await _exchange(
                    connection,
                    connection,
                    p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=request),
                )
            except BaseException:
                connection.close()
                raise
            return connection
        raise AssertionError("unreachable")

    async def _ask(self, request: Any, deadline: float) -> Any:
        async with _converted_errors(deadline):
            reader, writer = await asyncio.open_unix_connection(self._socket)
            try:
                return await _exchange(reader, writer, request)
            finally:
                writer.close()


async def _exchange(
    reader: asyncio.StreamReader | P2pdSocket, writer: asyncio.StreamWriter | P2pdSocket, request: Any
) -> Any:
    await write_pbmsg(writer, request)
    answer = p2pd_pb2.Response()
    await read_pbmsg_safe(reader, answer)
    if answer.type == p2pd_pb2.Response.ERROR:
        raise PeerUnreachable(_reason(answer.error.msg))
    return answer


def _reason(message: str) -> str:
    """The last cause that libp2p names; before it stand the causes' causes, and a line for each address."""
    return message.strip().splitlines()[-1].rsplit(": ", 1)[-1].rstrip(")")


@asynccontextmanager
async def _converted_errors(deadline: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(deadline):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded(f"no answer within {deadline:g} s") from error
    except (OSError, EOFError) as error:
        raise TransportDown(f"p2pd is gone ({error})") from error


def _raw(peer: PeerId) -> bytes:
    raw: bytes = PeerID.from_base58(peer).to_bytes()
    return raw


def _texts(addresses: Any) -> list[str]:
    return [str(Multiaddr(address)) for address in addresses]
