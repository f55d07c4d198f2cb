"""A trained swarm's model taken out: exports that transformers loads, and the same text whoever generates it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import bootstrap.export.fetching
import node.model.replica
import node.state.transfer
from bootstrap.evaluation.measuring import (
    WantedLosses,
    checkpoint_loss,
    evaluate_route,
    evaluate_swarm,
    held_out_text,
    text_of_files,
)
from bootstrap.export.checkpoint import weights_of
from bootstrap.export.export_cli import PARTIAL, ExportOrder
from bootstrap.export.exporting import export
from bootstrap.export.tokenizer import tokenizer_file, tokenizer_of_run
from bootstrap.generation.exported import generate_tokens, load_exported
from bootstrap.generation.generate_cli import Decoding
from bootstrap.generation.swarm_answer import SwarmAnswer
from bootstrap.generation.writing import TextStream, first_tokens
from bootstrap.inspect.observer import Observer
from bootstrap.simulation.swarm import SimulatedSwarm
from node.daemon import Node
from node.data.tokenizer import identity_of
from node.model.replica import Replica
from node.pipeline.inference import Inference
from node.state.transfer import PIECES_IN_FLIGHT, StateService
from protocol.codec import encode
from protocol.errors import JoinError, Refused, ResourceError, TokenizerError
from protocol.messages.peers import GetStatePiece
from protocol.messages.training import Predict, Predicted
from protocol.rpc import Answer, Request
from protocol.transport.base import PeerId
from tests.swarm.micro import guest_of, micro_swarm, observer_of, peer_of, run_swarm, stage_nodes, until
from tests.unit.tokenizers_made_here import bpe

PROMPT = "ethe sin"


async def finished(replicas: int, **settings: Any) -> SimulatedSwarm:
    """A swarm whose run is complete, its nodes still there."""
    swarm: SimulatedSwarm = micro_swarm(**settings)
    await swarm.start(replicas)
    await until(lambda: all(node.public_state == "finished" for node in swarm.nodes.values()), step=0.5)
    return swarm


Look = Callable[[SimulatedSwarm, Observer], Awaitable[Any]]


def visiting(replicas: int, look: Look, **settings: Any) -> Any:
    """What `look(swarm, observer)` returns of a finished swarm."""

    async def main() -> Any:
        swarm = await finished(replicas, **settings)
        try:
            return await look(swarm, await observer_of(swarm))
        finally:
            await swarm.leave()

    return run_swarm(main())


async def said_by_swarm(observer: Observer, decoding: Decoding, prompt: str = PROMPT, **more: Any) -> str:
    tokenizer = tokenizer_of_run(observer.manifest, None)
    ids = first_tokens(tokenizer, prompt, observer.manifest.data.sequence_tokens)
    stream = TextStream(tokenizer, lambda text: None)
    answer = SwarmAnswer(observer, (await observer.routes())[0], **more)
    async for token in answer.tokens(ids, decoding, tokenizer.end):
        stream.put(token)
    return stream.end()


def said_by_export(directory: Path, decoding: Decoding, prompt: str = PROMPT) -> str:
    loaded = load_exported(directory)
    stream = TextStream(loaded.tokenizer, lambda text: None)
    generate_tokens(loaded, loaded.tokenizer.ids_of(prompt), decoding, stream.put)
    return stream.end()


GREEDY = Decoding(most_tokens=20)
SAMPLED = Decoding(most_tokens=20, temperature=0.8, top_k=12, top_p=0.95, seed=3)


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "grouped queries": {"model__kv_heads": 1},
    "tied embeddings": {"model__tied_embeddings": True, "stages": 2},
    "tied in one stage": {"model__tied_embeddings": True, "stages": 1},
    "sliding window": {"model__family": "mistral", "model__sliding_window": 8},
}


@pytest.mark.long_but("llama")
@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS.keys())
def test_an_export_is_the_swarms_model_and_says_what_the_swarm_says(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    own = tmp_path / "own.txt"
    own.write_text("the sin, the tin and – ähm – the shin\n" * 3)

    async def look(swarm: SimulatedSwarm, observer: Observer) -> list[str]:
        route = (await observer.routes())[0]
        await export(observer, ExportOrder(tmp_path / "model", route=route, shard_size="8KB"))
        tokenizer = tokenizer_of_run(swarm.manifest, None)
        for text in (
            held_out_text(swarm.manifest, swarm.corpus, 16, tokenizer),
            text_of_files([str(own)], "text", tokenizer, swarm.manifest.data.sequence_tokens, 2),
        ):
            live, exported = (
                await evaluate_route(observer, text, route),
                checkpoint_loss(tmp_path / "model", text),
            )
            assert abs(live.nats - exported.nats) < 1e-3
            assert live.bits_per_byte == pytest.approx(exported.bits_per_byte, abs=1e-3)
        assert live.bytes == live.tokens == own.stat().st_size - 1
        return [await said_by_swarm(observer, decoding) for decoding in (GREEDY, SAMPLED)]

    greedy, sampled = visiting(2, look, **settings)
    directory = tmp_path / "model"
    assert greedy == said_by_export(directory, GREEDY)
    assert sampled == said_by_export(directory, SAMPLED)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(directory),
        AutoTokenizer.from_pretrained(directory),
    )
    inputs = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False)
    told = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0]
    assert greedy == tokenizer.decode(told[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert len(greedy) == 20
    assert sampled != greedy
    assert len(list(directory.glob("model-*-of-*.safetensors"))) > 1
    assert not (directory / PARTIAL).exists()
    card = (directory / "README.md").read_text()
    assert "[outer]" in card
    assert "training loss" in card
    assert "## Contributors" in card


def contents_of(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}


def test_a_run_that_is_complete_is_there_until_its_nodes_are_told_to_leave(tmp_path: Path) -> None:
    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        await asyncio.sleep(200)
        assert [one.public_state for one in swarm.nodes.values()] == ["finished"] * 2
        await export(observer, ExportOrder(tmp_path / "model"))
        assert len(await said_by_swarm(observer, GREEDY)) == 20

    visiting(1, look, inner__total_steps=2, inner__warmup_steps=1)


def sizes_of_weights(directory: Path) -> list[int]:
    return [file.stat().st_size for file in sorted(directory.glob("*.safetensors"))]


def test_the_files_of_an_export(tmp_path: Path) -> None:
    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        for name, dtype, most in (
            ("one", "fp32", "2GB"),
            ("half", "bf16", "2GB"),
            ("several", "fp32", "8KB"),
        ):
            await export(observer, ExportOrder(tmp_path / name, dtype=dtype, shard_size=most))

    visiting(1, look, inner__total_steps=2, inner__warmup_steps=1)
    described = {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md",
        "noloco.json", "SHA256SUMS",
    }  # fmt: skip
    for directory in tmp_path.iterdir():
        names = {file.name for file in directory.iterdir()}
        lines = [line.split("  ") for line in (directory / "SHA256SUMS").read_text().splitlines()]
        assert {name for _, name in lines} == names - {"SHA256SUMS"}
        for digest, name in lines:
            assert hashlib.sha256((directory / name).read_bytes()).hexdigest() == digest
        for config in (GenerationConfig.from_pretrained(directory), AutoConfig.from_pretrained(directory)):
            assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 0, 0)
        weights = names - described
        if directory.name != "several":
            assert weights == {"model.safetensors"}
        else:
            index = json.loads((directory / "model.safetensors.index.json").read_text())
            assert weights == {"model.safetensors.index.json", *index["weight_map"].values()}
            assert all(
                re.fullmatch(r"model(-\d{5}-of-\d{5}\.safetensors|.*\.json)", name) for name in weights
            )
    [whole], [half] = sizes_of_weights(tmp_path / "one"), sizes_of_weights(tmp_path / "half")
    assert half < 0.6 * whole  # each file has a header beside
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    largest = max(tensor.nbytes for tensor in tensors.values())
    assert all(size < max(8_000, largest) + 2_000 for size in sizes_of_weights(tmp_path / "several"))


def test_any_member_is_enough_and_the_founder_is_not_needed(tmp_path: Path) -> None:
    async def look(swarm: SimulatedSwarm, _: Observer) -> str:
        swarm.network.kill(swarm.seed_peer.transport.peer_id)
        member = stage_nodes(swarm, 1)[1]
        rpc = await guest_of(swarm, "later")
        await rpc.transport.connect(member.transport.addresses(), 5.0)
        observer = Observer(rpc.transport, rpc, swarm.seed_peer.signed)
        await export(observer, ExportOrder(tmp_path / "model"))
        said = await said_by_swarm(observer, GREEDY)
        await rpc.close()
        return said

    said = visiting(2, look, inner__total_steps=6)
    assert len(said) == 20
    assert (tmp_path / "model" / "config.json").exists()


# --- interrupted, damaged and changing sources ------------------------------------------------------


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of a dozen pieces, as large ones have."""
    for module in (node.model.replica, node.state.transfer, bootstrap.export.fetching):
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

        pieces = sum(node.replica.pieces for node in nodes)
        for one in nodes:
            meddled(one, refuse_after(nodes[0].replica.pieces + 2))
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
        assert len(asked) == 1 + nodes[1].replica.pieces - 2
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
        call = observer.rpc.call

        async def counted(peer: PeerId, message: Any, *more: Any, **settings: Any) -> Any:
            nonlocal under_way, most
            is_piece = isinstance(message, GetStatePiece)
            under_way += is_piece
            most = max(most, under_way)
            try:
                return await call(peer, message, *more, **settings)
            finally:
                under_way -= is_piece

        observer.rpc.call = counted  # type: ignore[method-assign]
        await export(observer, ExportOrder(tmp_path))
        assert len(damaged) == sum(one.replica.pieces for one in both) > 2 * PIECES_IN_FLIGHT
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


# --- answers from a swarm ------------------------------------------------------------------------


def test_an_answer_goes_on_when_a_round_ends_and_says_so(tmp_path: Path) -> None:
    told: list[str] = []

    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        tokenizer = tokenizer_of_run(swarm.manifest, None)
        route = (await observer.routes())[0]
        answer = SwarmAnswer(observer, route, told.append)
        prompt, tokens = first_tokens(tokenizer, PROMPT, 32), list[int]()
        async for token in answer.tokens(prompt, GREEDY, None):
            tokens.append(token)
            if len(tokens) == 5:
                replica = next(one.replica for one in stage_nodes(swarm, 1) if peer_of(one) == route[1])
                replica.phi.add_(
                    torch.randn(replica.parameters, generator=torch.Generator().manual_seed(1)), alpha=0.3
                )
                replica.round += 1
        rest = Decoding(most_tokens=15)
        again = [t async for t in SwarmAnswer(observer, route).tokens(prompt + tokens[:5], rest, None)]
        assert tokens[5:] == again

    visiting(1, look, inner__total_steps=6)
    assert len(told) == 1
    assert "stage 1" in told[0]


@dataclass(frozen=True)
class Asked:
    """A request for a next token that was answered."""

    peer: PeerId
    position: int  # of the first token that came with it
    tokens: int
    logits: int  # in the answer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """What the nodes of a swarm answer from now on."""
    seen: list[Asked] = []
    on_predict = Inference.on_predict

    async def noted(self: Inference, request: Request[Predict]) -> Answer[Predicted]:
        answer = await on_predict(self, request)
        tokens, logits = request.tensors()[0].shape[1], answer.tensors[0].shape[0]
        seen.append(Asked(self._context.me, request.message.position, tokens, logits))
        return answer

    monkeypatch.setattr(Inference, "on_predict", noted)
    return seen


@pytest.mark.parametrize("decoding", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_each_token_goes_once_along_one_route_with_the_slow_weights(
    decoding: Decoding, asked: list[Asked]
) -> None:
    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        route = (await observer.routes())[0]
        said = await said_by_swarm(observer, decoding)
        assert len(said) == 20
        for peer in route:
            mine = [(seen.position, seen.tokens) for seen in asked if seen.peer == peer]
            assert mine == [(0, len(PROMPT)), *((len(PROMPT) + told, 1) for told in range(19))]
        assert {seen.peer for seen in asked} == set(route)
        assert {seen.logits for seen in asked} == {decoding.needed} <= {1, 12}
        for one in swarm.nodes.values():
            one.replica.flat.values.add_(1.0)
        assert await said_by_swarm(observer, decoding) == said

    visiting(2, look, inner__total_steps=6)


async def said_slowly(observer: Observer, seconds: float) -> list[int]:
    tokenizer = tokenizer_of_run(observer.manifest, None)
    prompt = first_tokens(tokenizer, PROMPT, observer.manifest.data.sequence_tokens)
    tokens = list[int]()
    async for token in SwarmAnswer(observer, (await observer.routes())[0]).tokens(prompt, GREEDY, None):
        tokens.append(token)
        if len(tokens) == 3:
            await asyncio.sleep(seconds)
    return tokens


def test_what_was_kept_of_an_answer_is_gone_after_a_minute_and_computed_again(asked: list[Asked]) -> None:
    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        at_once = await said_slowly(observer, 0.0)
        for pause, is_gone in ((50.0, False), (61.0, True)):
            asked.clear()
            assert await said_slowly(observer, pause) == at_once
            whole = [one.tokens for one in asked if one.position == 0]
            assert whole == [len(PROMPT)] * 2 + [len(PROMPT) + 3] * 2 * is_gone

    visiting(1, look, inner__total_steps=6)


LONGER = {"model__rope": {"type": "dynamic", "factor": 2.0}, "model__max_positions": 16}


@pytest.mark.parametrize("settings", [MODELS["sliding window"], LONGER], ids=["window", "dynamic"])
def test_only_where_positions_change_with_the_length_every_token_costs_the_whole_text(
    settings: dict[str, Any], asked: list[Asked]
) -> None:
    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        await said_by_swarm(observer, GREEDY)

    visiting(1, look, inner__total_steps=2, inner__warmup_steps=1, **settings)
    costs = sorted(one.tokens for one in asked)
    if settings is LONGER:
        assert {one.position for one in asked} == {0}
        assert costs == sorted([*range(len(PROMPT), len(PROMPT) + 20)] * 2)
    else:
        assert costs == sorted([len(PROMPT), *[1] * 19] * 2)


def test_an_answer_ends_before_where_the_model_ends_the_text() -> None:
    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        answer = SwarmAnswer(observer, (await observer.routes())[0])
        whole = [token async for token in answer.tokens([7], SAMPLED, None)]
        end = whole[-1]
        ended = [token async for token in answer.tokens([7], SAMPLED, end)]
        assert ended == whole[: whole.index(end)]
        assert len(whole) == SAMPLED.most_tokens

    visiting(1, look, inner__total_steps=6)


def test_an_answer_ends_with_the_context_and_fails_with_its_route(tmp_path: Path) -> None:
    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        assert len(await said_by_swarm(observer, Decoding(most_tokens=1000))) == 32 - len(PROMPT)
        route = (await observer.routes())[0]
        answer = SwarmAnswer(observer, route).tokens([7], GREEDY, None)
        await anext(answer)
        swarm.kill(next(number for number, one in swarm.nodes.items() if peer_of(one) == route[1]))
        with pytest.raises(JoinError, match="Run the command again"):
            await anext(answer)

    visiting(1, look, inner__total_steps=6)


def test_run_again_it_takes_replicas_that_are_there() -> None:
    """At once, while the record of the one that died is still found."""

    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        route = (await observer.routes())[0]
        swarm.kill(next(number for number, one in swarm.nodes.items() if peer_of(one) == route[1]))
        again = await observer_of(swarm, "again")
        routes = await again.routes()
        assert route[1] in again.view.holding(1, again.transport.now())
        assert not any(route[1] in taken for taken in routes)
        assert len(await said_by_swarm(again, GREEDY)) == 20
        await again.rpc.close()

    visiting(2, look, inner__total_steps=6)


def test_each_replica_in_turn_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.txt"
    own.write_text("the sin, the tin\n" * 9)
    wanted = WantedLosses((str(own),), "text", held_out=False, sequences=None, cache=tmp_path)

    async def look(swarm: SimulatedSwarm, observer: Observer) -> list[str]:
        @asynccontextmanager
        async def here(*_: object) -> AsyncIterator[Observer]:
            yield observer

        async def at_once(_: str, work: Callable[..., Any], *args: Any) -> Any:
            return work(*args)

        monkeypatch.setattr("bootstrap.evaluation.measuring.visit", here)
        monkeypatch.setattr("bootstrap.evaluation.measuring.in_background", at_once)
        await evaluate_swarm([], "", wanted, every_replica=True, own="")
        await evaluate_swarm([], "", wanted, every_replica=False, own="")
        return [peer_of(one)[-8:] for one in swarm.nodes.values()]

    replicas = visiting(3, look, inner__total_steps=2, inner__warmup_steps=1)
    *lines, mean, one_alone = capsys.readouterr().out.splitlines()
    assert sorted(" → ".join(line.split("through ")[1] for line in lines).split(" → ")) == sorted(replicas)
    assert "mean over 3 routes" in mean
    assert one_alone == lines[0]


def test_requests_that_fit_no_model_are_refused() -> None:
    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        first, last = (stage_nodes(swarm, stage)[0] for stage in (0, 1))

        async def ask(tensors: list[torch.Tensor], node: Node = first, **changes: Any) -> str:
            fields = {"stage": 0, "route": [peer_of(last)], "answer": "a", "position": 0, "top": 1, **changes}
            encoded = [encode(t, "fp32" if t.is_floating_point() else "int32") for t in tensors]
            with pytest.raises(Refused) as refused:
                await observer.rpc.call(peer_of(node), Predict(**fields), encoded, deadline=10.0)
            return refused.value.code

        tokens = torch.ones(1, 4, dtype=torch.int32)
        assert await ask([tokens], stage=1, route=[]) == "not-serving"
        assert await ask([tokens], route=[]) == "not-serving"
        assert await ask([tokens], position=3) == "forgotten"
        assert await ask([tokens, tokens]) == "bad-shape"
        assert await ask([torch.ones(1, 33, dtype=torch.int32)]) == "bad-shape"
        assert await ask([torch.ones(1, 0, dtype=torch.int32)]) == "bad-shape"
        assert await ask([torch.ones(2, 4, dtype=torch.int32)]) == "bad-shape"
        assert await ask([tokens * 256]) == "bad-shape"
        assert await ask([tokens.float()]) == "bad-shape"
        to_last: dict[str, Any] = {"node": last, "stage": 1, "route": []}
        assert await ask([torch.ones(1, 4, 8)], **to_last) == "bad-shape"
        assert await ask([torch.full((1, 4, 16), torch.nan)], **to_last) == "non-finite"

    visiting(1, look, inner__total_steps=2, inner__warmup_steps=1)
