"""Places for requests: how many, who gets them, and that none are lost."""

from __future__ import annotations

import asyncio

import pytest

from protocol.access.peer_limits import BUDGET, FEWEST, MOST, RequestLimiter, places_for


@pytest.mark.parametrize(
    ("payload", "places"),
    [(0, MOST), (64 << 10, MOST), (4 << 20, 16), (16 << 20, FEWEST), (1 << 30, FEWEST)],
)
def test_larger_payloads_have_fewer_places(payload: int, places: int) -> None:
    assert places_for(payload) == places
    assert places == FEWEST or places * payload <= BUDGET


async def test_who_waits_gets_the_next_place_in_turn() -> None:
    places, order = RequestLimiter(), list[int]()

    async def one(number: int) -> None:
        await places.take(2)
        order.append(number)
        await asyncio.sleep(0)
        places.give_back()

    await asyncio.gather(*(one(number) for number in range(10)))
    assert order == list(range(10))
    assert not places.taken


async def test_who_stops_waiting_takes_no_place_along() -> None:
    places = RequestLimiter()
    await places.take(1)
    early, late = (asyncio.ensure_future(places.take(1)) for _ in range(2))
    await asyncio.sleep(0)
    early.cancel()
    await asyncio.sleep(0)
    places.give_back()
    late.cancel()  # has been given the place, and cannot take it any more
    await asyncio.gather(early, late, return_exceptions=True)
    await asyncio.wait_for(places.take(1), 1)
    assert places.taken == 1
