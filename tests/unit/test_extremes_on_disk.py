"""Numbers that cannot be, in each file that is read from the disk: refused with what to do, and nothing is lost."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

from node.giving.ledger import ContributionLedger
from node.membership.past import Past
from node.service.kept_best import best_in
from node.storage.checkpoint_files import (
    OF_ONE_STAGE,
    Checkpoint,
    contents_of,
    header_of,
    path_of,
    piece_of,
    read,
)
from node.storage.position import Position
from node.storage.stage_state import LARGEST, StageState
from node.storage.state_directory import StateDirectory
from protocol.errors import StateError
from protocol.files.keeping import MOST_JSON_BYTES
from protocol.records.identity import Identity
from protocol.records.lineage import MOST_BEGINNINGS, Lineage

RUN, SIZE, STAGE = "run-1", 64, 1
HUGE = 10**30
PEER, OTHER = (Identity.from_seed("someone", number).peer_id for number in range(2))


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDirectory]:
    directory = StateDirectory(tmp_path / "state")
    directory.open()
    yield directory
    directory.close()


def checkpoint(step: int = 7, **changes: Any) -> Checkpoint:
    tensors = torch.rand(5, SIZE, generator=torch.Generator().manual_seed(step % 97)).unbind()
    made = StageState(step, 3, 2, step - 1, *(tensor.clone() for tensor in tensors))
    of_state = {name: changes.pop(name) for name in list(changes) if hasattr(made, name)}
    return replace(Checkpoint(STAGE, replace(made, **of_state), tokens=512, saved=10.0), **changes)


def written(state: StateDirectory, wrong: Checkpoint) -> Path:
    """The checkpoint in its place as the node itself would write it, checksums and all."""
    path = path_of(state.path, STAGE)
    path.write_bytes(b"".join(contents_of(RUN, wrong)))
    return path


NUMBERS: dict[str, dict[str, Any]] = {
    "a step below 0": {"step": -5},
    "a step that nobody takes": {"step": HUGE},
    "a round below 0": {"round": -1},
    "a round that nobody has": {"round": HUGE},
    "steps in a round below 0": {"steps_in_round": -1},
    "steps in a round": {"steps_in_round": HUGE},
    "updates below 0": {"updates": -1},
    "updates": {"updates": HUGE},
    "a stage below 0": {"stage": -1},
    "a stage": {"stage": HUGE},
    "tokens below 0": {"tokens": -1},
    "tokens": {"tokens": HUGE},
    "saved before all": {"saved": -1.0},
    "saved at no time": {"saved": math.nan},
    "saved never": {"saved": math.inf},
    "saved in a million years": {"saved": 1e14},
    "begun too often": {"lineage": Lineage(MOST_BEGINNINGS + 1, 0.0)},
    "begun in a million years": {"lineage": Lineage(0, 1e14)},
}
IN_HEADER = {"step", "round", "stage", "saved", "lineage"}
VALUES = [1e38, -1e38, 2 * LARGEST, math.nan, math.inf, -math.inf]
TENSORS = ["phi", "theta", "delta", "first_moment", "second_moment"]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_checkpoint_with_a_number_that_cannot_be_says_so(state: StateDirectory, name: str) -> None:
    path = written(state, checkpoint(**NUMBERS[name]))
    before = path.read_bytes()
    for ask in (lambda: state.checkpoint(RUN, STAGE), lambda: state.checkpoint(RUN), lambda: read(path)):
        with pytest.raises(StateError, match=r"checkpoint-1\.safetensors is damaged.*Delete it"):
            ask()
    if NUMBERS[name].keys() & IN_HEADER:
        assert state.kept(RUN) == []  # and so nobody is offered it
    assert path.read_bytes() == before


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("tensor", TENSORS)
def test_a_checkpoint_with_weights_that_cannot_be_says_so(
    state: StateDirectory, tensor: str, value: float
) -> None:
    made = torch.rand(SIZE)
    made[5] = value
    changes: dict[str, Any] = {tensor: made}
    path = written(state, checkpoint(**changes))
    with pytest.raises(StateError, match=rf"is damaged.*its {tensor.replace('_', ' ')} goes from.*Delete it"):
        state.checkpoint(RUN, STAGE)
    if tensor != "theta":
        with pytest.raises(StateError, match="is damaged"):
            piece_of(header_of(path), slice(0, SIZE))
        assert len(piece_of(header_of(path), slice(6, SIZE))) == 4


def test_the_largest_numbers_that_can_be_are_read(state: StateDirectory) -> None:
    most = checkpoint(step=10**12, phi=torch.full((SIZE,), LARGEST), tokens=2**63, lineage=Lineage(9, 1.7e9))
    state.save_checkpoint(RUN, most)
    found = state.checkpoint(RUN, STAGE)
    assert found is not None
    assert (found.state.step, found.tokens, found.state.lineage) == (10**12, 2**63, Lineage(9, 1.7e9))


@pytest.mark.parametrize("kind", ["float64", "int32", "another size"])
def test_a_checkpoint_with_tensors_of_another_kind_is_damaged(state: StateDirectory, kind: str) -> None:
    path = written(state, checkpoint())
    contents, old = path.read_bytes(), b'"theta": {"dtype": "F32", "shape": [64]'
    assert old in contents
    new = {
        "float64": b'"theta": {"dtype": "F64", "shape": [32]',
        "int32": b'"theta": {"dtype": "I32", "shape": [64]',
        "another size": b'"theta": {"dtype": "F32", "shape":[8,8]',
    }[kind]
    path.write_bytes(contents.replace(old, new))
    assert state.kept(RUN) == []
    with pytest.raises(StateError, match="is damaged"):
        state.checkpoint(RUN, STAGE)


# --- an older one beside it ---------------------------------------------------------------------


def steps(state: StateDirectory) -> int:
    found = state.checkpoint(RUN, STAGE)
    assert found is not None
    return found.state.step


@pytest.mark.parametrize(
    "wrong", [{"step": HUGE}, {"phi": torch.full((SIZE,), 1e38)}], ids=["step", "weights"]
)
@pytest.mark.parametrize("of_version", [1, 2])
def test_an_older_checkpoint_takes_the_place_of_a_damaged_one_which_is_kept(
    state: StateDirectory, wrong: dict[str, Any], of_version: int, caplog: pytest.LogCaptureFixture
) -> None:
    if of_version == 1:
        (state.path / OF_ONE_STAGE).write_bytes(b"".join(contents_of(RUN, checkpoint(step=5))))
    else:
        state.save_checkpoint(RUN, checkpoint(step=5))
        state.save_checkpoint(RUN, checkpoint(step=6, lineage=Lineage(1, 100.0)))  # begun anew
    damaged = written(state, checkpoint(**wrong)).read_bytes()
    with caplog.at_level(logging.WARNING):
        assert steps(state) == 5
    assert "Going on from the older" in caplog.text
    assert steps(state) == 5 if of_version == 1 else True
    state.save_checkpoint(RUN, checkpoint(step=8))
    assert steps(state) == 8
    assert (state.path / "checkpoint-1.safetensors.damaged").read_bytes() == damaged
    written(state, checkpoint(step=-1))
    if of_version == 2:
        assert steps(state) == 5
        assert (state.path / "checkpoint-1.safetensors.damaged").read_bytes() == damaged
        assert (state.path / "checkpoint-1.safetensors.damaged1").exists()


# --- small files --------------------------------------------------------------------------------

DEEP = b"[" * 200_000 + b"]" * 200_000
LONG = b'{"tokens": 1' + b"0" * 10_000 + b"}"


@pytest.mark.parametrize(
    "contents", [DEEP, LONG, b"[" + b"1," * (MOST_JSON_BYTES // 2) + b"1]", b"NaN", b"null"]
)
def test_a_small_file_that_nobody_wrote_counts_as_empty(state: StateDirectory, contents: bytes) -> None:
    for name in ("node.json", "peers.json", "given.json", "contribution.json"):
        (state.path / name).write_bytes(contents)
    assert state.facts() == {}
    assert state.peer_book() == []
    assert state.given() == 0
    assert ContributionLedger.read(state.ledger_path).had == {}
    state.remember(port=1)
    assert state.facts() == {"port": 1}


@pytest.mark.parametrize("tokens", [-1, HUGE, 1e300, math.inf, math.nan, "7", [], None])
def test_tokens_that_were_never_given_are_none(state: StateDirectory, tokens: object) -> None:
    (state.path / "given.json").write_text(json.dumps({"tokens": tokens}))
    assert state.given() == 0


def test_addresses_that_cannot_be_dialled_keep_nobody_from_the_others(state: StateDirectory) -> None:
    good = f"/ip4/192.0.2.1/tcp/31337/p2p/{PEER}"
    bad = [
        "",
        "x",
        "/ip4/999.0.0.1/tcp/1/p2p/x",
        f"/ip4/192.0.2.1/tcp/{HUGE}/p2p/{PEER}",
        "a" * 10**6,
        "\x00",
    ]
    (state.path / "peers.json").write_text(json.dumps([*bad, 7, None, ["a"], good]))
    assert state.addresses() == [good]


@pytest.mark.parametrize("number", [-1, HUGE, 1.5, math.inf, math.nan, "7", None])
@pytest.mark.parametrize("place", ["had tokens", "had rounds", "receipt tokens", "receipt rounds"])
def test_a_ledger_loses_only_the_entries_that_cannot_be(
    state: StateDirectory, number: object, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    had: dict[str, list[object]] = {PEER: [3, 2, "a"], OTHER: [5, 4, "b"]}
    receipts: list[list[object]] = [[PEER, OTHER, 7, 1, "c", "00" * 64], [PEER, PEER, 8, 1, "d", "00" * 64]]
    of, what = place.split()
    if of == "had":
        had[PEER][what == "rounds"] = number
    else:
        receipts[1][2 + (what == "rounds")] = number
    state.save_ledger(json.dumps({"had": had, "receipts": receipts}))
    with caplog.at_level(logging.WARNING):
        ledger = ContributionLedger.read(state.ledger_path)
    assert "1 of its entries cannot be" in caplog.text
    assert len(ledger.had) + len(ledger.receipts) == 3
    assert ledger.signed(RUN, OTHER, PEER, lambda data: bytes(64)) is not None  # packs its numbers


@pytest.mark.parametrize("wrong", [-HUGE, HUGE, 10**400, math.inf, math.nan, "7", None])
@pytest.mark.parametrize("name", ["loss", "time"])
def test_a_best_loss_that_cannot_be_is_none(name: str, wrong: object) -> None:
    fact = {"run": RUN, "loss": 2.5, "time": 1e9}
    assert best_in(fact, RUN) is not None
    assert best_in(fact | {name: wrong}, RUN) is None


@pytest.mark.parametrize("number", [-1, 2**63, 1.5, "1", None, HUGE])
@pytest.mark.parametrize("name", ["epoch", "document", "token", "drawn"])
def test_a_position_that_cannot_be_is_none(name: str, number: object) -> None:
    facts: dict[str, object] = {**Position("corpus", 1, 2, 3, 4).facts()}
    assert Position.of(facts) is not None
    assert Position.of(facts | {name: number}) is None


@pytest.mark.parametrize(
    "extreme", [-1, HUGE % 2**64, -(2**63), math.inf, math.nan, 1e308, "x", None, [], b"", {}]
)
@pytest.mark.parametrize("place", range(6))
def test_the_past_passes_over_what_cannot_be(place: int, extreme: object) -> None:
    past = Past(RUN, lambda _: 100, 10.0, lambda: 1000.0)
    entry: list[object] = [PEER, STAGE, 0, b"sealed", 1000.0, 990.0]
    entry[place] = extreme
    past.take_up(msgpack.packb([entry, extreme, [extreme] * 6]))
    past.take_up(b"\x91" * 100_000)
    assert past.of(STAGE) == []
