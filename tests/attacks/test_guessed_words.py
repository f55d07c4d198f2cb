"""An invitation's words at a real port: guessed, listened to by idle connections, and right in the end."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bootstrap.creating.words_of_seed import EXCHANGES, WordAnswers, invite_by_words
from node.membership.by_words import accept_invitation
from protocol.access.tokens import Token
from protocol.access.words import MOST_TRIES
from protocol.errors import JoinError, TokenError
from protocol.rpc.rpc import Rpc
from protocol.transport.peer_at import address_at
from tests.real.test_libp2p_transport import OnLoopback
from tests.unit.test_tokens import OWNER, RUN

HERE = "127.0.0.1"
WRONG = "acorn-acorn-acorn"
IDLE = 50


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[OnLoopback]:
    network = OnLoopback(tmp_path)
    yield network
    await network.close()


async def seed_peer(network: OnLoopback, directory: Path) -> tuple[Rpc, int]:
    """A peer that gives what is in the directory for its words, and its port."""
    rpc = Rpc(await network.peer("seed"))
    WordAnswers(rpc.transport.peer_id, directory, time.time).serve(rpc)
    await rpc.start()
    return rpc, int(rpc.transport.addresses()[0].split("/")[4])


async def test_words_are_right_once_beside_idle_connections_and_end_after_three_wrong_tries(
    network: OnLoopback, tmp_path: Path
) -> None:
    rpc, port = await seed_peer(network, tmp_path)
    token = Token.issue(RUN, OWNER, None, 1, time.time() + 3_600.0).to_text()
    idle = [await asyncio.open_connection(HERE, port) for _ in range(IDLE)]
    words = invite_by_words(tmp_path, token, time.time())
    address, given = await accept_invitation(words, [], f"{HERE}:{port}")
    assert (address, given) == (rpc.transport.addresses()[0], token)
    with pytest.raises(TokenError, match="have been used"):
        await accept_invitation(words, [address], "")
    words = invite_by_words(tmp_path, token, time.time())
    for _ in range(MOST_TRIES):
        await asyncio.sleep(1 / EXCHANGES[1][1])
        with pytest.raises(TokenError, match="not the words"):
            await accept_invitation(WRONG, [address], "")
    with pytest.raises(TokenError, match="tried wrongly three times"):
        await accept_invitation(words, [address], "")
    for _, writer in idle:
        writer.close()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"", "ends the connection"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it says b'HTTP"),
        (b"\x13/multistream/1.0.0\n\x0b/tls/1.0.0\n" + bytes(4_096), "it says nothing"),
        (b"\x13/multistream/1.0.0\n\x03na\n" + bytes(64), "it says"),
    ],
    ids=["nothing", "a web server", "no TLS", "no peer of ours"],
)
async def test_what_is_no_peer_is_told(said: bytes, told: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await reader.read(20)
        writer.close()

    server = await asyncio.start_server(answer, HERE, 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(JoinError, match=told):
            await address_at(HERE, port)


async def test_where_nobody_listens_is_told() -> None:
    with socket.socket() as free:
        free.bind((HERE, 0))
        port = free.getsockname()[1]
    with pytest.raises(JoinError, match=f"Nobody answers at {HERE}, port {port}"):
        await address_at(HERE, port)
