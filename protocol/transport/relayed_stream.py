"""A stream to a peer through a third one: TLS 1.3 between the two ends, in frames that the third passes on unread.

Both ends have a certificate that they made of their identity's key, and each takes for the other's whatever
certificate has the key that is in its peer id: so what TLS checks is that the other end is that peer, as libp2p's own
TLS does (https://github.com/libp2p/specs/blob/master/tls/tls.md).
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from protocol.errors import DeadlineExceeded, PeerUnreachable, RecordError
from protocol.ground import Buffer, PeerId
from protocol.records.identity import Identity, public_key_of
from protocol.transport.base import Stream
from protocol.windows import short, window

_LENGTH = struct.Struct(">I")
MOST_IN_FRAME = 2**17  # bytes: a slice in TLS records, each of which adds 22 to 2^14
SLICE = 2**16  # bytes that are encrypted at once
MOST_OF_CERTIFICATE = 2_048
_VALID = (
    datetime(2000, 1, 1, tzinfo=UTC),
    datetime(9999, 12, 31, tzinfo=UTC),
)  # clocks of volunteers are wrong


async def write_frame(stream: Stream, body: Buffer) -> None:
    await stream.write(_LENGTH.pack(len(body)), body)


async def read_frame(stream: Stream, most: int = MOST_IN_FRAME) -> Buffer:
    """Raises `PeerUnreachable` for a frame of more than `most` bytes, too."""
    (size,) = _LENGTH.unpack(await stream.read(_LENGTH.size))
    if not 0 < size <= most:
        raise PeerUnreachable(
            f"{stream.remote} sent a frame of {size:,} bytes where at most {most:,} may come"
        )
    return await stream.read(size)


class Certificate:
    """A peer's own certificate with its key, in a file that OpenSSL reads; who has it can speak as the peer."""

    def __init__(self, identity: Identity, file: Path) -> None:
        """Write the file, readable by its owner only. Raises `OSError`."""
        key = identity.private_key
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, identity.peer_id)])
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(_VALID[0])
            .not_valid_after(_VALID[1])
            .sign(key, None)
        )
        self.shown = made.public_bytes(serialization.Encoding.DER)
        self.file = file
        file.touch(mode=0o600)
        file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            + made.public_bytes(serialization.Encoding.PEM)
        )

    @window
    def __repr__(self) -> str:
        return f"File: {self.file}"

    def context(self, peer: PeerId, shown: Buffer, *, is_server: bool) -> ssl.SSLContext:
        """Return what lets nobody but `peer` be the other end. Raises `PeerUnreachable` for another's certificate."""
        try:
            theirs = x509.load_der_x509_certificate(bytes(shown))
            key = theirs.public_key()
            if not isinstance(key, Ed25519PublicKey) or key.public_bytes_raw() != public_key_of(peer):
                raise ValueError("it has another key")
            made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
            made.minimum_version = ssl.TLSVersion.TLSv1_3
            made.check_hostname = False
            made.verify_mode = ssl.CERT_REQUIRED
            if is_server:
                made.num_tickets = 0  # nobody goes on with a session
            made.load_verify_locations(cadata=theirs.public_bytes(serialization.Encoding.PEM).decode())
            made.load_cert_chain(self.file)
        except (ValueError, TypeError, RecordError, OSError) as error:  # an SSLError is an OSError
            raise PeerUnreachable(f"{peer} shows a certificate that is not its own: {error}") from error
        return made


class RelayedStream(Stream):
    """Encrypted from this end to `remote`, over a stream to the peer between them.

    Mutable state: what OpenSSL keeps of the connection, the bytes on their way into and out of it, and whether there
    is a direct connection by now.
    """

    def __init__(self, remote: PeerId, carrier: Stream, context: ssl.SSLContext, *, is_server: bool) -> None:
        self.remote = remote
        self.protocol = ""  # that it is of, once it is open
        self._carrier = carrier
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._goes, server_side=is_server)
        self._writing = asyncio.Lock()  # frames of several tasks do not mix
        self._is_superseded = False

    @window
    def __repr__(self) -> str:
        return f"Peer: {short(self.remote)} | Through: {short(self._carrier.remote)}"

    @property
    def through(self) -> PeerId:
        """The peer between the two ends."""
        return self._carrier.remote

    @property
    def is_superseded(self) -> bool:
        return self._is_superseded

    def supersede(self) -> None:
        """Note that there is a direct connection to the peer."""
        self._is_superseded = True

    @property
    def heard(self) -> float:
        return self._carrier.heard

    @property
    def wrote(self) -> float:
        return self._carrier.wrote

    async def shake_hands(self, deadline: float) -> None:
        """Return once both ends know that the other is who it should be. Raises as `Transport.open`."""
        try:
            async with asyncio.timeout(deadline):
                while True:
                    try:
                        self._tls.do_handshake()
                    except ssl.SSLWantReadError:
                        await self._send()
                        self._came.write(await read_frame(self._carrier))
                    else:
                        await self._send()
                        return
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.remote} did not answer through {self.through}") from error
        except ssl.SSLError as error:
            raise PeerUnreachable(f"{self.remote} could not be told from others: {error.reason}") from error

    async def read(self, size: int) -> Buffer:
        """See `Stream.read`."""
        whole = bytearray()
        while len(whole) < size:
            try:
                got = self._tls.read(size - len(whole))
            except ssl.SSLWantReadError:
                self._came.write(await read_frame(self._carrier))
                continue
            except ssl.SSLError as error:
                raise PeerUnreachable(f"the stream from {self.remote} ended: {error.reason}") from error
            if not got:
                raise PeerUnreachable(f"the stream from {self.remote} ended")
            whole += got
        return whole

    async def write(self, *buffers: Buffer) -> None:
        """See `Stream.write`."""
        async with self._writing:
            for buffer in buffers:
                view = memoryview(buffer)
                if not view.nbytes:
                    continue
                view = view.cast("B")
                for start in range(0, len(view), SLICE):
                    try:
                        self._tls.write(view[start : start + SLICE])
                    except ssl.SSLError as error:
                        raise PeerUnreachable(f"the stream to {self.remote} is closed") from error
                    await self._send()

    async def _send(self) -> None:
        if self._goes.pending:
            await write_frame(self._carrier, self._goes.read())

    def close(self) -> None:
        self._carrier.close()


async def call_through(carrier: Stream, peer: PeerId, own: Certificate, deadline: float) -> RelayedStream:
    """Begin a stream to `peer` over one that is passed on to it. Raises as `Transport.open`, `carrier` closed."""
    return await _begun(carrier, peer, own, deadline, is_server=False)


async def answer_through(carrier: Stream, peer: PeerId, own: Certificate, deadline: float) -> RelayedStream:
    """Take a stream that is passed on from `peer`. Raises as `Transport.open`, `carrier` closed."""
    return await _begun(carrier, peer, own, deadline, is_server=True)


async def _begun(
    carrier: Stream, peer: PeerId, own: Certificate, deadline: float, *, is_server: bool
) -> RelayedStream:
    try:
        async with asyncio.timeout(deadline):
            await write_frame(carrier, own.shown)
            shown = await read_frame(carrier, MOST_OF_CERTIFICATE)
            made = RelayedStream(
                peer, carrier, own.context(peer, shown, is_server=is_server), is_server=is_server
            )
            await made.shake_hands(deadline)
            return made
    except TimeoutError as error:
        carrier.close()
        raise DeadlineExceeded(f"{peer} did not answer through {carrier.remote}") from error
    except BaseException:
        carrier.close()
        raise
