"""The p2pd process: libp2p in Go, the only child of a peer's process.

p2pd ends by itself within seconds when its parent dies, even by kill -9: it notices that the connection which
hivemind keeps open to it has closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import UserError, later
from protocol.files.folders import folder_for_sockets, folders_of_others
from protocol.supervision import Supervisor, cancelled, seen
from protocol.transport.hivemind_api import P2P, P2PDaemonError
from protocol.transport.metering import UNMETERED, Meter
from protocol.transport.p2pd_socket import P2pdControl
from protocol.transport.ports import require_port
from protocol.transport.tcp_counts import TcpCounts
from protocol.windows import window

logger = logging.getLogger(__name__)

_STOP_TIMEOUT = 3.0  # seconds between SIGTERM and SIGKILL; p2pd takes a few milliseconds when it is well
_LAST_LINES = 5
_COUNT_SECONDS, _COUNT_SELDOM = 1.0, 60.0  # between looks at what the kernel counts
_COUNT_SHARE = 0.02  # of the time is spent on looking: the kernel lists all connections of the machine
# A session of its own, where the machine has the command for it: Ctrl-C in a terminal is for its parent, which still
# needs the network to leave. It replaces itself by p2pd, so that the child is p2pd.
_OWN_SESSION = [path for path in [shutil.which("setsid")] if path is not None]
# `-relay=0` leaves it on: p2pd's flags only ever switch it on, and it is on unless this file says otherwise. Then
# p2pd passes on what strangers send, 128 KiB a connection or 4 GiB, outside of all limits.
_NO_RELAY = '{"Relay": {"Enabled": false}}'
IDLE_TIMEOUT = 10  # seconds; a p2pd whose parent died before it connected ends by itself after this


@dataclass(frozen=True)
class Libp2pConfig:
    """Settings of how a peer listens and what it tells others; nothing is looked up or opened here."""

    host: str = "127.0.0.1"  # the address to listen on; "0.0.0.0" for all of IPv4
    port: int = 0  # 0: any free one, kept for as long as the transport lives
    announce: tuple[str, ...] = ()  # multiaddresses without /p2p/ that replace those found on this machine
    nat_port_map: bool = False  # ask the home router to forward the port (UPnP, NAT-PMP)
    client_only: bool = False  # listen nowhere and store nothing for others: for observers
    startup_timeout: float = 60.0  # seconds
    upload: float = 0.0  # bytes per second at most, as an interface counts; 0 is no limit
    download: float = 0.0


class P2pd:
    """One running p2pd. `P2pd.start` makes it; `exited` tells when it is gone; `stop` ends it."""

    def __init__(
        self,
        p2p: P2P,
        directory: Path,
        supervisor: Supervisor,
        meter: Meter = UNMETERED,
        is_counted: bool = True,
    ) -> None:
        """The meter knows only what streams carry, unless it `is_counted`."""
        self.p2p = p2p  # hivemind's handle, which its DHT needs
        self.directory = directory  # holds the sockets; nobody else on this machine may enter it
        self.control = P2pdControl(Path(p2p.daemon_listen_maddr["unix"]), meter)
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        for task in (p2p._client.control._read_task, p2p._client.control._write_task):
            task.add_done_callback(seen)  # it breaks when p2pd dies, as it must
        stops = "p2pd stands still once its output is full."
        supervisor.keep("reading what p2pd says", self._read_output, stops)
        self._meter = meter
        if is_counted:
            stops = "What p2pd sends and receives besides is estimated."
            supervisor.keep("counting what p2pd sends and receives", self._count, stops)

    @classmethod
    async def start(
        cls, identity: Path, config: Libp2pConfig, supervisor: Supervisor, meter: Meter = UNMETERED
    ) -> P2pd:
        """Start p2pd within `config.startup_timeout`.

        Raises `ResourceError` when the port is taken or no folder can have its sockets, and `UserError` when p2pd
        does not start for another reason; nothing is left behind then, and it may be repeated.
        """
        host_addresses = None if config.client_only else [_listen_address(config)]
        _remove_former()
        prefix = f"noloco-{os.getpid()}-{pids_known()}-"
        directory = folder_for_sockets(prefix)
        file, handles = directory / "p2pd.json", list[P2P]()

        class Handle(P2P):  # type: ignore[misc] # hivemind has no types
            """Keeps its sockets in the private directory, and is known even if it never gets ready.

            Encrypts with TLS 1.3 alone. p2pd prefers Noise where both ends have it, and its ChaCha20 costs a
            third more of p2pd's processor time per byte than AES does where the processor helps with it.
            """

            _UNIX_SOCKET_PREFIX = f"/unix{directory}/"

            def __init__(self) -> None:
                super().__init__()
                handles.append(self)

            @staticmethod
            def _make_process_args(*arguments: object, **flags: object) -> list[str]:
                command: list[str] = P2P._make_process_args(*arguments, noise=False, f=file, **flags)
                return [*_OWN_SESSION, *command]

        try:
            file.write_text(_NO_RELAY)
            async with asyncio.timeout(config.startup_timeout):
                p2p = await Handle.create(
                    host_maddrs=host_addresses,
                    no_listen=config.client_only,
                    announce_maddrs=list(config.announce) or None,
                    dht_mode="client" if config.client_only else "server",
                    identity_path=str(identity),
                    use_relay=False,  # `passing_on` does what its relays do, counted and within a bound
                    use_auto_relay=False,
                    auto_nat=not config.client_only,
                    nat_port_map=config.nat_port_map,
                    startup_timeout=config.startup_timeout,
                    idle_timeout=IDLE_TIMEOUT,
                    check_if_identity_free=False,  # it would start a second p2pd first
                )
                # hivemind's reader dies of a line over 64 KiB, and then p2pd hangs once the pipe is full
                await cancelled([p2p._reader_task])
        except BaseException as error:
            for handle in handles:
                await _end(handle)
            shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, P2PDaemonError | OSError | EOFError | ValueError | TimeoutError):
                raise _start_failure(error, config) from error
            raise
        return cls(
            p2p, directory, supervisor, meter, is_counted=not config.client_only
        )  # visitors have no limits

    @window
    def __repr__(self) -> str:
        return f"Process: {self.pid or 'not started'} | Sockets: {self.directory}"

    @property
    def pid(self) -> int | None:
        """The number of the process, also once it has ended."""
        child = self.p2p._child
        return None if child is None else child.pid

    async def exited(self) -> str:
        """Wait for the process to end; says how it ended, for the log.

        hivemind's `is_alive` stays true and its calls hang when p2pd dies, so this is what to watch.
        """
        code = await self.p2p._child.wait()
        lines = " / ".join(self._last_lines)
        return f"exit code {code}" + (f", last output: {lines}" if lines else "")

    async def stop(self) -> None:
        """End the process, politely at first, and remove its sockets. Takes 3 s at most, if p2pd is frozen."""
        await _end(self.p2p)
        shutil.rmtree(self.directory, ignore_errors=True)

    async def _count(self) -> None:
        counts, clock = TcpCounts(self.p2p._child.pid), asyncio.get_running_loop().time
        began = clock()
        while (moved := await asyncio.to_thread(counts.since_last)) is not None:
            self._meter.counted(*moved)
            await asyncio.sleep(pause_after(clock() - began))
            began = clock()

    async def _read_output(self) -> None:
        while chunk := await self.p2p._child.stdout.read(1 << 16):
            for line in chunk.decode(errors="replace").splitlines():
                logger.debug("p2pd: %s", line[:1000])
                self._last_lines.append(line[:300])


def pause_after(took: float) -> float:
    """Return the seconds to wait before the kernel is asked again, when its answer took so many."""
    return min(max(_COUNT_SECONDS, took / _COUNT_SHARE), _COUNT_SELDOM)


async def _end(p2p: P2P) -> None:
    p2p._terminate()
    child = p2p._child
    if child is None:
        return
    try:
        async with asyncio.timeout(_STOP_TIMEOUT):
            await child.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()


def _listen_address(config: Libp2pConfig) -> str:
    """Return the address to listen on, if its port is free.

    p2pd shares a port with other programs without complaint; both would then miss connections.
    """
    if config.announce and not config.port:
        raise UserError("An announced address leads to a fixed port of this machine: choose it with --port.")
    address = require_port(config.host, config.port)
    return f"/ip{address.version}/{address}/tcp/{config.port}"


def _start_failure(error: BaseException, config: Libp2pConfig) -> UserError:
    if isinstance(error, TimeoutError):
        late = f"p2pd did not start within {config.startup_timeout:g} s."
        return later(UserError(f"{late} Is this machine overloaded? Try again."))
    return UserError(f"p2pd did not start. {error}. Check --host, --port and --announce, then try again.")


def pids_known() -> str:
    """A name for the processes this one sees by number: containers that share a /tmp do not see each other's."""
    try:
        return f"{Path('/proc/self/ns/pid').stat().st_ino:x}"
    except OSError:
        return "all"


def _remove_former() -> None:
    """Remove the directories of processes that were killed and could not remove their own."""
    for place in folders_of_others():
        for directory in place.glob(f"noloco-[0-9]*-{pids_known()}-*"):
            if not Path(f"/proc/{directory.name.split('-')[1]}").exists() and Path("/proc/self").exists():
                shutil.rmtree(directory, ignore_errors=True)
