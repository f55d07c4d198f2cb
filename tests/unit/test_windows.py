"""What objects show of themselves: one line, short peer ids, numbers with their units, no keys, and never an error."""

from __future__ import annotations

import ast
import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from node.config import NodeConfig
from node.links.links import Links
from node.membership.view import View
from node.model.compute import ComputeThread, InlineCompute, Priority
from node.model.replica import Replica
from node.model.state_directory import StateDirectory
from node.watch.trace import TraceFile
from protocol.announcement import Announcement
from protocol.ground import PeerId
from protocol.identity import Identity
from protocol.messages.training import Ready
from protocol.peer_limits import Allowance, Bans, Inflow, PeerTable, RequestLimiter
from protocol.supervision import Supervisor
from protocol.tokens import Token
from protocol.transport.memory import MemoryNetwork, MemoryTransport
from protocol.transport.virtual_time import run_virtual
from protocol.windows import amount, counted, short, window
from tests.unit.test_tokens import OWNER, RUN
from tests.unit.two_peers import in_virtual_time, say_done, two_peers
from tests.unit.whole_models import micro_manifest

ROOT = Path(__file__).parents[2]
SERVER, CALLER = (short(Identity.from_seed(name).peer_id) for name in ("server", "caller"))


def windows() -> list[str]:
    """The classes of protocol/ and node/ that have one, by module and name."""
    found = list[str]()
    for package in ("protocol", "node"):
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and any(map(_is_window, node.body)):
                    found.append(f"{'.'.join(file.relative_to(ROOT).with_suffix('').parts)}:{node.name}")
    return found


def _is_window(node: ast.stmt) -> bool:
    named = isinstance(node, ast.FunctionDef) and node.name == "__repr__"
    return named and any(isinstance(d, ast.Name) and d.id == "window" for d in node.decorator_list)


@pytest.mark.parametrize("name", windows())
def test_an_object_whose_making_failed_can_be_printed(name: str) -> None:
    pytest.importorskip("hivemind") if "transport.dht" in name else None
    module, kind = name.split(":")
    made = __import__(module, fromlist=[kind]).__dict__[kind]
    half_built = made.__new__(made)
    assert repr(half_built).startswith(f"<{kind} [")
    assert "\n" not in repr(half_built)
