"""A node that is killed in the middle of a write: what was saved before, or the new, is there whole.

The process ends, by SIGKILL, before or after each call to the system in turn with which files are opened, written,
renamed, removed or flushed, until a write comes to its end.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from node.storage.checkpoint_files import Checkpoint
from node.storage.stage_state import StageState
from node.storage.state_directory import StateDirectory
from tests.real.killed_write import killed_at

RUN = "run-1"
SIZE = 5000  # parameters: the file has more than a buffer's bytes


def checkpoint(step: int) -> Checkpoint:
    tensors = (torch.arange(5 * SIZE, dtype=torch.float32) * step).reshape(5, SIZE).unbind()
    return Checkpoint(
        1, StageState(step, 3, 2, step - 1, *(tensor.clone() for tensor in tensors)), tokens=512
    )


CHECKPOINTS = {step: checkpoint(step) for step in (1, 2)}
WRITES: dict[str, Callable[[StateDirectory, int], None]] = {
    "checkpoint": lambda state, step: state.save_checkpoint(RUN, CHECKPOINTS[step]),
    "peer book": lambda state, step: state.save_peer_book([f"/ip4/192.0.2.{step}/tcp/1"] * 50),
    "tokens given": lambda state, step: state.save_given(step),
    "facts": lambda state, step: state.remember(port=4000 + step),
}


def step_of(state: StateDirectory, write: str) -> int:
    """Which of the two writes a fresh start finds, whole."""
    if write == "peer book":
        return int(state.peer_book()[0].split("/")[2].rpartition(".")[2])
    if write == "tokens given":
        return state.given()
    if write == "facts":
        port = state.facts()["port"]
        assert isinstance(port, int)
        return port - 4000
    found = state.checkpoint(RUN)
    assert found is not None
    wanted = CHECKPOINTS[found.state.step].state.tensors()
    assert found.state.tensors().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.state.tensors().items())
    return found.state.step


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("is_after", [False, True], ids=["before a call", "after a call"])
def test_a_write_that_is_killed_at_any_call_leaves_one_that_is_whole(
    write: str, is_after: bool, tmp_path: Path
) -> None:
    path, found, call, was_killed = tmp_path / "state", [], 0, True
    while was_killed:
        call += 1
        state = StateDirectory(path)
        state.open()
        WRITES[write](state, 1)
        assert not list(path.glob("*.new"))  # what the killed process left beside, this write has removed
        state.close()
        was_killed = killed_at(
            call, is_after=is_after, path=path, write=lambda state: WRITES[write](state, 2)
        )
        again = StateDirectory(path)
        again.open()
        found.append(step_of(again, write))
        again.close()
    assert found[0] == 1
    assert found[-1] == 2
    assert found == sorted(found)  # from one call on it is the new one
    assert len(found) > 6, found
