"""A seed peer's news of what it passes on between members that cannot dial each other."""

from __future__ import annotations

import asyncio
import logging

from protocol.transport.base import Transport
from protocol.windows import amount

logger = logging.getLogger(__name__)

TOLD_EVERY = 300.0  # seconds, if it has passed anything on meanwhile


def bound_in_words(rate: float) -> str:
    """Return the sentence for the start, for a bound in bytes per second."""
    if not rate:
        return "This seed peer passes nothing on between members that cannot dial each other (--relay-for-others 0)."
    return (
        "Between members that nobody can dial, as behind home routers, this seed peer passes on up to "
        f"{rate * 8e-6:.3g} Mbit/s in all, encrypted from end to end. --relay-for-others has another bound, and 0 "
        "passes nothing on."
    )


async def tell_passed_on(transport: Transport, rate: float) -> None:
    """Log every `TOLD_EVERY` seconds, for ever, how much was passed on, unless it was nothing."""
    before = transport.passed_on
    while True:
        await asyncio.sleep(TOLD_EVERY)
        now = transport.passed_on
        if now > before:
            mbit = (now - before) * 8e-6 / TOLD_EVERY
            logger.info(
                "Passed on between members that cannot dial each other: %s in all, %.3g Mbit/s of %.3g lately.",
                amount(now),
                mbit,
                rate * 8e-6,
            )
        before = now
