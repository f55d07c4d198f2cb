"""Faults inside a node's process: a clock that jumps, losses that are NaN, asked for by a file in its directory.

The nodes know nothing of it. The process that they are forked from imports this module before all others, so that
whoever takes `time.time` by its name takes this one.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from node.model.passes import Learned

FILE_NAME = "faults.json"
LOOK_SECONDS = 0.2

_true_time = time.time
_asked: dict[str, float] = {"hours": 0.0, "nan": 0.0}  # of this process
time.time = lambda: _true_time() + 3600 * _asked["hours"]


def ask(directory: Path, hours: float = 0.0, nan: bool = False) -> None:
    """Ask the node of this state directory for faults from now on; without arguments, for none."""
    from protocol.files.keeping import replace_whole  # this module comes before all others

    replace_whole(directory / FILE_NAME, json.dumps({"hours": hours, "nan": float(nan)}).encode())


def obey(directory: Path) -> None:
    """Do from now on what the file asks for; called in a node's process before it begins."""
    from node.model.passes import Passes

    learned = Passes.last_stage

    def last_stage(self: Passes, *inputs: Any) -> Learned:
        loss, by_inputs = learned(self, *inputs)
        return (loss * float("nan") if _asked["nan"] else loss), by_inputs

    Passes.last_stage = last_stage  # type: ignore[method-assign, assignment]
    threading.Thread(target=_follow, args=(directory / FILE_NAME,), name="faults", daemon=True).start()


def _follow(path: Path) -> None:
    while True:
        if path.exists():
            _asked.update(json.loads(path.read_text(encoding="utf-8")))
        time.sleep(LOOK_SECONDS)
