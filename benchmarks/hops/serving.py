"""The life of a measured process: it starts, answers commands until there are none, and stops."""

from __future__ import annotations

import asyncio
from typing import Any

from averaging.coordination import next_command, say


async def serve_commands(peer: Any) -> None:
    """`peer` has `start` and `stop`, and a method for each command."""
    loop = asyncio.get_running_loop()
    try:
        say(await peer.start())
        while (command := await loop.run_in_executor(None, next_command)) is not None:
            say(await getattr(peer, command.pop("command"))(**command))
    finally:
        await peer.stop()
