"""What streams wait for, so that a peer stays below its volunteer's limits."""

from __future__ import annotations

import os
import random
import socket
import threading

import pytest

from protocol.ground import PeerId
from protocol.transport.libp2p_session import Libp2pStream
from protocol.transport.metering import AIM, HEADERS, Meter
from protocol.transport.p2pd import pause_after
from protocol.transport.tcp_counts import TcpCounts

RATE = 1e6


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


@pytest.mark.parametrize("size", [1_000, 50_000, 400_000])
def test_over_a_minute_no_more_goes_than_the_limit(size: int) -> None:
    clock, sent, rng = Clock(), 0, random.Random(1)
    meter = Meter(upload=RATE, clock=clock)
    while clock.time < 1060.0:
        clock.time += meter.sending(size)
        sent += size
        if rng.random() < size / 2e7:
            clock.time += 3.0  # nothing to send; it is not saved up
    assert sent * HEADERS <= 60 * RATE * AIM + 0.2 * RATE + size * HEADERS
    assert sent > 0.3 * 60 * RATE


def test_streams_take_turns_and_share_one_limit() -> None:
    meter = Meter(upload=RATE, clock=Clock())
    waits = [meter.sending(100_000) for _ in range(10)]
    assert waits == sorted(waits)
    assert waits[-1] == pytest.approx(10 * 100_000 * HEADERS / (RATE * AIM))


def test_a_limit_that_is_changed_holds_at_once_also_for_what_is_owed() -> None:
    clock = Clock()
    meter = Meter(clock=clock)
    assert meter.sending(50 << 20) == 0.0
    meter.limit(RATE, 0.0)
    waited = meter.sending(500_000)
    assert waited == pytest.approx(500_000 * HEADERS / (RATE * AIM), rel=0.01)
    meter.limit(RATE / 4, 0.0)
    assert meter.sending(1_000) == pytest.approx(4 * (waited + 1_000 * HEADERS / (RATE * AIM)), rel=0.01)
    meter.limit(0.0, 0.0)
    assert meter.sending(50 << 20) == 0.0


@pytest.mark.parametrize("rates", [(0.0, RATE), (RATE, 0.0), (RATE, RATE / 50)])
async def test_a_limit_that_changes_while_a_message_goes_loses_none_of_it(
    rates: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    meter, parts = Meter(rates[0], clock=Clock()), list[bytes]()

    class Socket:
        meter: Meter

        def is_closing(self) -> bool:
            return False

        def write(self, data: memoryview) -> None:
            parts.append(bytes(data))
            meter.limit(rates[len(parts) % 2], 0.0)

        async def drain(self) -> None: ...

    async def no_wait(_: float) -> None: ...

    monkeypatch.setattr("protocol.transport.libp2p_session.asyncio.sleep", no_wait)
    socket = Socket()
    socket.meter = meter
    sent = random.Random(1).randbytes(9 << 20)
    await Libp2pStream(PeerId("somebody"), socket).write(sent)  # type: ignore[arg-type]
    assert b"".join(parts) == sent
    assert len({len(part) for part in parts}) > 1


def test_without_a_limit_nothing_waits_and_everything_is_counted() -> None:
    meter = Meter()
    assert [meter.sending(1 << 20), meter.received(1 << 30)] == [0.0, 0.0]
    sent, received = meter.moved
    assert received == pytest.approx((1 << 30) * HEADERS, rel=0.01)
    assert sent > 1 << 20


def test_what_the_kernel_counts_beyond_the_streams_is_paid_for() -> None:
    clock = Clock()
    meter = Meter(upload=RATE, clock=clock)
    meter.sending(100_000)
    clock.time += 10
    meter.counted(500_000, 0)  # 395,000 of them by p2pd itself
    assert meter.sending(1_000) == pytest.approx(0.396 / AIM - 0.1, rel=0.02)
    assert meter.moved == (500_000, 0)
    clock.time += 10
    meter.counted(0, 0)
    assert meter.sending(1_000) == 0.0


def test_the_kernel_tells_what_a_process_has_sent() -> None:
    counts = TcpCounts(os.getpid())
    if counts.since_last() is None:
        pytest.skip("this system does not tell")
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with near, far:
            sending = threading.Thread(target=near.sendall, args=(bytes(1_000_000),))
            sending.start()
            got = 0
            while got < 1_000_000:
                got += len(far.recv(1 << 20))
            sending.join()
            moved = counts.since_last()
            assert moved is not None
            assert 1_000_000 < moved[0] < 1_100_000
            assert 1_000_000 < moved[1] < 1_100_000
            assert counts.since_last() == (0, 0)
    assert TcpCounts(2**22 + 1).since_last() is None  # no such process


@pytest.mark.parametrize(("took", "pause"), [(0.001, 1.0), (0.064, 3.2), (0.5, 25.0), (9.0, 60.0)])
def test_a_machine_of_many_connections_is_asked_more_rarely(took: float, pause: float) -> None:
    """The kernel lists all of them, in 64 ms where there are 3,300: fifty peers of a test took a core by that."""
    assert pause_after(took) == pytest.approx(pause)
