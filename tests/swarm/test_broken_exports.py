"""Exports from sources that break off, are damaged, or change meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import bootstrap.export.fetching
import node.model.fragment
import node.state.transfer
from bootstrap.export.checkpoint import weights_of
from bootstrap.export.exporting import export
from bootstrap.export.folder import PARTIAL
from bootstrap.export.order import ExportOrder
from bootstrap.export.tokenizer import tokenizer_file
from bootstrap.inspect.observer import Observer
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.data.tokenizer import identity_of
from node.model.replica import Replica
from node.process.daemon import Node
from node.state.transfer import PIECES_IN_FLIGHT, StateService
from protocol.errors import JoinError, Refused, ResourceError, TokenizerError
from protocol.ground import PeerId
from protocol.messages.state import GetStatePiece
from protocol.rpc.rpc import Answer, Request
from tests.swarm.micro import micro_swarm, observer_of, run_swarm, stage_nodes
from tests.swarm.models_out import (
    contents_of,
    visiting,
)
from tests.unit.tokenizers_made_here import bpe


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of a dozen pieces, as large ones have."""
    for module in (node.model.fragment, node.state.transfer, bootstrap.export.fetching):
        monkeypatch.setattr(module, "PIECE_PARAMETERS", 600)
    monkeypatch.setattr(bootstrap.export.fetching, "PIECE_BYTES", 2400)


Meddle = Callable[[Request, Answer], Answer]


def meddled(node: Node, meddle: Meddle) -> None:
    """The node's answers to requests for its state go through `meddle` first."""
    service = StateService(node.context.stage, node.replica, node.context.compute)

    async def on_piece(request: Request) -> Answer:
        return meddle(request, await service.on_piece(request))

    node.context.rpc.handle(GetStatePiece.answered_by(on_piece))


def assert_exported(directory: Path, replicas: list[Replica]) -> None:
    """The checkpoint has the very weights of these replicas, one for each stage."""
    there = {
        name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    assert {file.stat().st_mode & 0o777 for file in directory.iterdir() if file.is_file()} == {0o644}
    expected = weights_of(replicas[0].manifest)
    assert there.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(there[name], weight.place.of(replicas[weight.stage].phi)), name


@pytest.mark.usefixtures("small_pieces")
def test_an_export_that_was_cut_short_goes_on_with_what_is_whole(tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []
    told: list[str] = []

    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        nodes = [stage_nodes(swarm, stage)[0] for stage in (0, 1)]

        def refuse_after(most: int) -> Meddle:
            def meddle(request: Request, answer: Answer) -> Answer:
                asked.append((request.message.stage, request.message.index))
                if request.message.stage == 1 and len(asked) > most:
                    raise Refused("failed", "the disk burns")
                return answer

            return meddle

        pieces = sum(node.replica.whole.pieces for node in nodes)
        for one in nodes:
            meddled(one, refuse_after(nodes[0].replica.whole.pieces + 2))
        with pytest.raises(JoinError, match="the disk burns"):
            await export(observer, ExportOrder(tmp_path))
        assert not (tmp_path / "config.json").exists()
        flat = tmp_path / PARTIAL / "stage-0000.f32"
        damaged = bytearray(flat.read_bytes())
        damaged[2 * 2400 + 7] ^= 1
        flat.write_bytes(damaged)
        with (tmp_path / PARTIAL / "stage-0001.jsonl").open("a") as journal:
            journal.write('[3, "a line that was cut')
        await asyncio.sleep(5)  # what was asked for last has been answered
        asked.clear()
        for one in nodes:
            meddled(one, refuse_after(1000))
        await export(observer, ExportOrder(tmp_path), tell=told.append)
        assert (0, 2) in asked
        assert len(asked) == 1 + nodes[1].replica.whole.pieces - 2
        assert len(set(asked)) == len(asked) < pieces - 5
        assert_exported(tmp_path, [one.replica for one in nodes])

    visiting(1, look, inner__total_steps=6)
    assert any("pieces are here already" in sentence for sentence in told)


@pytest.mark.usefixtures("small_pieces")
def test_a_damaged_piece_is_refused_and_a_round_that_ends_fetches_the_stage_again(tmp_path: Path) -> None:
    told: list[str] = []

    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        first, last = (stage_nodes(swarm, stage)[0] for stage in (0, 1))

        def lie(request: Request, answer: Answer) -> Answer:
            return Answer(answer.message.model_copy(update={"digest": bytes(32)}), answer.tensors)

        meddled(first, lie)
        with pytest.raises(JoinError, match="damaged on the way"):
            await export(observer, ExportOrder(tmp_path))
        assert not (tmp_path / "config.json").exists()

        def end_round(request: Request, answer: Answer) -> Answer:
            if request.message.index == 6 and not told_again():
                last.replica.phi.mul_(1.01)
                last.replica.round += 1
            return answer

        def told_again() -> bool:
            return any("fetching it again" in sentence for sentence in told)

        meddled(first, lambda request, answer: answer)
        meddled(last, end_round)
        await export(observer, ExportOrder(tmp_path), tell=told.append)
        assert told_again()
        assert_exported(tmp_path, [first.replica, last.replica])

    visiting(1, look, inner__total_steps=6)


@pytest.mark.usefixtures("small_pieces")
def test_a_piece_that_was_damaged_once_is_fetched_again_and_few_are_under_way(tmp_path: Path) -> None:
    damaged = set[tuple[int, int]]()
    under_way, most = 0, 0

    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        both = [stage_nodes(swarm, stage)[0] for stage in (0, 1)]

        def damage_once(request: Request, answer: Answer) -> Answer:
            place = (request.message.stage, request.message.index)
            if place in damaged:
                return answer
            damaged.add(place)
            return Answer(answer.message.model_copy(update={"digest": bytes(32)}), answer.tensors)

        for one in both:
            meddled(one, damage_once)
        call = observer.rpc.call_and_read

        async def counted(peer: PeerId, message: Any, *more: Any, **settings: Any) -> Any:
            nonlocal under_way, most
            is_piece = isinstance(message, GetStatePiece)
            under_way += is_piece
            most = max(most, under_way)
            try:
                return await call(peer, message, *more, **settings)
            finally:
                under_way -= is_piece

        observer.rpc.call_and_read = counted  # type: ignore[method-assign]
        await export(observer, ExportOrder(tmp_path))
        assert len(damaged) == sum(one.replica.whole.pieces for one in both) > 2 * PIECES_IN_FLIGHT
        assert_exported(tmp_path, [one.replica for one in both])

    visiting(1, look, inner__total_steps=6)
    assert most == PIECES_IN_FLIGHT


@pytest.mark.usefixtures("small_pieces")
def test_an_export_that_is_there_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    """And what was fetched for the new one of a round that has ended counts for nothing."""
    told: list[str] = []

    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        first, last = (stage_nodes(swarm, stage)[0] for stage in (0, 1))
        await export(observer, ExportOrder(tmp_path))
        before = contents_of(tmp_path)

        def fail_at_last(request: Request, answer: Answer) -> Answer:
            if request.message.index == 9:
                raise Refused("failed", "the disk burns")
            return answer

        meddled(last, fail_at_last)
        with pytest.raises(JoinError, match="the disk burns"):
            await export(observer, ExportOrder(tmp_path))
        assert contents_of(tmp_path) == before
        assert_exported(tmp_path, [first.replica, last.replica])
        await asyncio.sleep(5)
        first.replica.phi.mul_(1.01)
        first.replica.round += 1
        meddled(last, lambda request, answer: answer)
        await export(observer, ExportOrder(tmp_path), tell=told.append)
        assert_exported(tmp_path, [first.replica, last.replica])

    visiting(1, look, inner__total_steps=6)
    assert any("Stage 0" in said and "of other weights or damaged: started again" in said for said in told)
    assert any("Stage 1" in said and "pieces are here already" in said for said in told)


def test_a_replica_whose_rounds_are_too_short_is_tried_six_times(tmp_path: Path) -> None:
    told: list[str] = []

    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        last = stage_nodes(swarm, 1)[0]

        def ended(request: Request, answer: Answer) -> Answer:
            last.replica.round += 1
            return Answer(answer.message.model_copy(update={"round": last.replica.round}), answer.tensors)

        meddled(last, ended)
        with pytest.raises(JoinError, match=r"too fast for this link.*Export when the run is complete"):
            await export(observer, ExportOrder(tmp_path), tell=told.append)

    visiting(1, look, inner__total_steps=6)
    assert sum("fetching it again" in sentence for sentence in told) == 6
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("lie", ["refuses", "another round"])
def test_a_replica_that_gives_no_piece_or_never_the_same_round_is_left_for_another(
    lie: str, tmp_path: Path
) -> None:
    """Failed before: whoever had the smallest peer id of a stage could keep it from everybody, again and again."""

    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        liar, honest = sorted(stage_nodes(swarm, 1), key=lambda node: node.context.me)
        rounds = count(1_000)

        def meddle(request: Request, answer: Answer) -> Answer:
            if lie == "refuses":
                raise Refused("failed", "not now")
            return Answer(answer.message.model_copy(update={"round": next(rounds)}), answer.tensors)

        meddled(liar, meddle)
        facts = await export(observer, ExportOrder(tmp_path))
        assert [donor.peer for donor in facts.sources[1].donors] == [honest.context.me]

    visiting(2, look, inner__total_steps=6)


@pytest.mark.usefixtures("small_pieces")
def test_the_mean_over_replicas_is_their_mean_piece_by_piece(tmp_path: Path) -> None:
    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        exported = await export(observer, ExportOrder(tmp_path, mean=True))
        assert [len(source.donors) for source in exported.sources] == [3, 3]
        model = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
        for name, weight in weights_of(swarm.manifest).items():
            flats = [one.replica.phi for one in stage_nodes(swarm, weight.stage)]
            mean = torch.stack([weight.place.of(flat).double() for flat in flats]).mean(0)
            assert torch.equal(model[name], mean.float()), name
        await export(observer, ExportOrder(tmp_path, dtype="bf16"))
        assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16

    visiting(3, look, inner__total_steps=6)


@pytest.mark.parametrize("lacking", [0, 1])
def test_the_disk_needs_room_for_the_checkpoint_and_four_bytes_a_parameter(
    lacking: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        parameters = sum(stage_nodes(swarm, stage)[0].replica.parameters for stage in (0, 1))
        for dtype, each in (("fp32", 8), ("bf16", 6)):
            free = SimpleNamespace(free=each * parameters - lacking)
            monkeypatch.setattr("bootstrap.export.exporting.shutil.disk_usage", lambda _, free=free: free)
            order = ExportOrder(tmp_path / dtype, dtype=dtype)
            if lacking:
                with pytest.raises(ResourceError, match=r"needs .* while it is made.*Free some space"):
                    await export(observer, order)
            else:
                await export(observer, order)
                assert not (tmp_path / dtype / PARTIAL).exists()

    visiting(1, look, inner__total_steps=2, inner__warmup_steps=1)


def test_a_tokenizer_that_no_member_gives_may_be_named(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_bytes(bpe())
    settings: dict[str, Any] = {"data__tokenizer": identity_of(bpe()), "data__end_of_text": "<|endoftext|>"}

    async def main() -> None:
        swarm = micro_swarm(model__vocab_size=320, **settings)
        await swarm.seed_peer.start()  # without the file
        observer = await observer_of(swarm)
        with pytest.raises(TokenizerError, match="--tokenizer FILE"):
            await tokenizer_file(observer, "")
        assert await tokenizer_file(observer, str(own)) == bpe()
        own.write_bytes(bpe(280))
        with pytest.raises(TokenizerError, match="not the tokenizer of run 'micro'"):
            await tokenizer_file(observer, str(own))
        await observer.rpc.close()
        await swarm.leave()

    run_swarm(main())
