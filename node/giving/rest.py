"""The reasons for a node to rest: its volunteer, a limit that the volunteer set, or both."""

from __future__ import annotations

import asyncio
from typing import Literal

from protocol.supervision import until_event
from protocol.windows import window

Asker = Literal["volunteer", "limits"]


class Rest:
    """The reasons for which a node rests at present; it trains while there are none.

    Mutable state: the reasons, in words; `asked` is set while there are any, `over` while there are none, and the
    node rests while it `lasts`.
    """

    def __init__(self) -> None:
        self._reasons: dict[Asker, str] = {}
        self.asked = asyncio.Event()
        self.over = asyncio.Event()
        self.over.set()
        self.lasts = False

    @window
    def __repr__(self) -> str:
        asked = ", ".join(self._reasons) or "by nobody"
        return f"Asked for: {asked} | {'resting' if self.lasts else 'not resting'}"

    @property
    def reason(self) -> str:
        """The reasons in words, empty when nobody asks for rest."""
        return " ".join(self._reasons.values())

    def ask(self, asker: Asker, reason: str) -> None:
        """Ask for rest, with a `reason` of one sentence. May be repeated with another one."""
        self._reasons[asker] = reason
        self.over.clear()
        self.asked.set()

    async def last(self, leaving: asyncio.Event) -> None:
        """Rest until nobody asks for it any more, or the node is to leave."""
        self.lasts = True
        await until_event(self.over.wait(), leaving)
        self.lasts = False

    def lift(self, asker: Asker) -> None:
        """Ask for rest no more; others may still do so. May be repeated."""
        self._reasons.pop(asker, None)
        if not self._reasons:
            self.asked.clear()
            self.over.set()
