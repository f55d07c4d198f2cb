"""Finds the id of the libp2p peer that listens at a host and port, which p2pd needs before it can dial there.

It does what a dialling peer does first: agrees on TLS by multistream-select, and reads the peer's public key from its
certificate (libp2p's specification, tls/tls.md). Nothing here says that the peer is the one that was meant: whoever
uses the id has to prove that by other means, as `protocol.access.word_exchange` does.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from contextlib import suppress

from cryptography import x509

from protocol.errors import JoinError, RecordError, later
from protocol.records.addresses import check_address
from protocol.records.identity import peer_id_of
from protocol.transport.libp2p_session import GREETING

DEADLINE = 10.0
_TLS = b"\x0b/tls/1.0.0\n"  # multistream-select: a length, the name, a line end
_HOST_KEY = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")  # the certificate's extension with the peer's key
# of that extension, in DER: a sequence, and in it the octets of a PublicKey protobuf {type: Ed25519, data: 32 bytes}
_SEQUENCE, _OCTETS_OF_KEY = 0x30, bytes.fromhex("042408011220")
_KEY_BYTES = 32
# by a certificate that is none, or is not a peer's; four of them are no `ValueError`
_NO_PEERS = (
    ValueError,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)


async def address_at(host: str, port: int) -> str:
    """Return the multiaddress of the peer that listens there, within `DEADLINE`. Raises `JoinError` where none does.

    A failure leaves nothing behind; it may be repeated.
    """
    try:
        async with asyncio.timeout(DEADLINE):
            return await _address_at(host, port)
    except RecordError as problem:
        raise JoinError(
            f"At {host}, port {port}, something answers that is no peer of a run ({problem}). Ask for the port of "
            "the run's seed peer, and give it as --at HOST:PORT."
        ) from None
    except (OSError, TimeoutError) as error:
        reason = (
            "it says nothing" if isinstance(error, TimeoutError) else getattr(error, "strerror", "") or error
        )
        raise later(
            JoinError(
                f"Nobody answers at {host}, port {port} ({reason}). Check --at, that the seed peer runs there, and "
                "that its TCP port is open."
            )
        ) from None


async def _address_at(host: str, port: int) -> str:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        found = ipaddress.ip_address(writer.get_extra_info("peername")[0].partition("%")[0])
        writer.write(GREETING + _TLS)
        for expected in (GREETING, _TLS):
            if (said := await reader.readexactly(len(expected))) != expected:
                raise RecordError(f"it says {said[:20]!r}")
        await writer.start_tls(_unverified())
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return check_address(f"/ip{found.version}/{found}/tcp/{port}/p2p/{_peer_in(certificate)}")
    except (asyncio.IncompleteReadError, ssl.SSLError, ConnectionError):
        raise RecordError("it ends the connection") from None
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def _unverified() -> ssl.SSLContext:
    """TLS as libp2p has it: certificates sign themselves."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["libp2p"])
    return context


def _peer_in(certificate: bytes | None) -> str:
    """Return the id of the peer whose certificate it is. Raises `RecordError`."""
    try:
        extensions = x509.load_der_x509_certificate(certificate or b"").extensions
        told = extensions.get_extension_for_oid(_HOST_KEY).value
    except _NO_PEERS:
        raise RecordError("its certificate is not a peer's") from None
    raw = told.value if isinstance(told, x509.UnrecognizedExtension) else b""
    before, found, key = raw.partition(_OCTETS_OF_KEY)
    if not (found and len(before) in (2, 3) and before[0] == _SEQUENCE and len(key) >= _KEY_BYTES):
        raise RecordError("its certificate names no Ed25519 key")
    return peer_id_of(key[:_KEY_BYTES])
