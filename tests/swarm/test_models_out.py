"""A trained swarm's model taken out: exports that transformers loads, and the same text whoever generates it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import bootstrap.export.fetching
import node.model.replica
import node.state.transfer
from bootstrap.evaluation.measuring import checkpoint_loss, evaluate_route, held_out_text, text_of_files
from bootstrap.export.checkpoint import weights_of
from bootstrap.export.export_cli import PARTIAL, ExportOrder
from bootstrap.export.exporting import export
from bootstrap.export.tokenizer import ids_of, transformers_tokenizer
from bootstrap.generation.exported import generate_tokens, load_exported
from bootstrap.generation.generate_cli import Decoding
from bootstrap.generation.swarm_answer import SwarmAnswer
from bootstrap.generation.writing import TextStream, first_tokens
from bootstrap.inspect.observer import Observer
from bootstrap.simulation.swarm import SimulatedSwarm
from node.daemon import Node
from node.model.replica import Replica
from node.state.transfer import StateService
from protocol.codec import encode
from protocol.errors import JoinError, Refused
from protocol.messages.peers import GetStatePiece
from protocol.messages.training import Predict
from protocol.rpc import Answer, Request
from tests.swarm.micro import micro_swarm, observer_of, peer_of, run_swarm, stage_nodes, until

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
    tokenizer = transformers_tokenizer(observer.manifest, None)
    ids = first_tokens(tokenizer, prompt, observer.manifest.data.sequence_tokens)
    stream = TextStream(tokenizer, lambda text: None)
    answer = SwarmAnswer(observer, (await observer.routes())[0], **more)
    async for token in answer.tokens(ids, decoding, tokenizer.eos_token_id):
        stream.put(token)
    return stream.end()


def said_by_export(directory: Path, decoding: Decoding, prompt: str = PROMPT) -> str:
    loaded = load_exported(directory)
    stream = TextStream(loaded.tokenizer, lambda text: None)
    generate_tokens(loaded, ids_of(loaded.tokenizer, prompt), decoding, stream.put)
    return stream.end()


GREEDY = Decoding(most_tokens=20)
SAMPLED = Decoding(most_tokens=20, temperature=0.8, top_k=12, top_p=0.95, seed=3)


MODELS = {
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
        tokenizer = transformers_tokenizer(swarm.manifest, None)
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


# --- answers from a swarm ------------------------------------------------------------------------


def test_an_answer_goes_on_when_a_round_ends_and_says_so(tmp_path: Path) -> None:
    told: list[str] = []

    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        tokenizer = transformers_tokenizer(swarm.manifest, None)
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
