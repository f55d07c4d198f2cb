"""The virtual clock: hours pass at once, exactly, and a deadlock is an error instead of a hang."""

from __future__ import annotations

import asyncio

import pytest

from bootstrap.lab.in_memory.virtual_time import Deadlock, run_virtual


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_year_passes_at_once_and_exactly() -> None:
    async def main() -> list[float]:
        times = [now()]
        for pause in (0.0, 0.125, 3600.0, 31_536_000.0, 1e-6):
            await asyncio.sleep(pause)
            times.append(now())
        return times

    assert run_virtual(main()) == [0.0, 0.0, 0.125, 3600.125, 31_539_600.125, 31_539_600.125001]


def test_timers_fire_in_order_and_at_their_time() -> None:
    async def main() -> list[tuple[int, float]]:
        fired: list[tuple[int, float]] = []

        async def sleeper(number: int) -> None:
            await asyncio.sleep(number / 10)
            fired.append((number, now()))

        await asyncio.gather(*(sleeper(number) for number in (3, 1, 2, 5, 4)))
        return fired

    assert run_virtual(main()) == [(number, number / 10) for number in (1, 2, 3, 4, 5)]


def test_deadlines_work() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await asyncio.Event().wait()
        assert now() == 7
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(60), 3)
        assert now() == 10
        assert await asyncio.wait_for(asyncio.sleep(1, "in time"), 3) == "in time"
        assert now() == 11
        done, pending = await asyncio.wait(
            [asyncio.create_task(asyncio.sleep(seconds)) for seconds in (1, 5)], timeout=2
        )
        assert (len(done), len(pending), now()) == (1, 1, 13)

    run_virtual(main())


def test_a_clock_that_has_run_for_ages_still_moves() -> None:
    async def main() -> None:
        await asyncio.sleep(1e15)
        await asyncio.sleep(1e-3)  # less than the clock can tell there
        await asyncio.sleep(10)
        assert now() >= 1e15 + 10

    run_virtual(main())


def test_a_deadlock_is_an_error_that_names_who_waits() -> None:
    async def waits_for_godot() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(waits_for_godot(), name="vladimir")
        await asyncio.sleep(5)
        await task

    with pytest.raises(Deadlock, match=r"vladimir in .*waits_for_godot at .*test_virtual_time\.py"):
        run_virtual(main())


def test_threads_become_plain_calls() -> None:
    async def main() -> None:
        assert await asyncio.to_thread(sorted, [2, 1]) == [1, 2]
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(divmod, 1, 0)
        assert now() == 0

    run_virtual(main())


def test_errors_and_left_over_tasks_end_as_usual() -> None:
    cancelled: list[bool] = []

    async def left_over() -> None:
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def main() -> None:
        task = asyncio.create_task(left_over())
        await asyncio.sleep(1)
        assert not task.done()
        raise LookupError("the main task failed")

    with pytest.raises(LookupError):
        run_virtual(main())
    assert cancelled == [True]


def test_a_hundred_thousand_timers_end_with_the_slowest() -> None:
    async def peer(number: int) -> None:
        for _ in range(50):
            await asyncio.sleep(1 + number / 1000)

    async def main() -> float:
        await asyncio.gather(*(peer(number) for number in range(2000)))
        return now()

    assert run_virtual(main()) == pytest.approx(50 * 2.999)
