"""A trained swarm's model taken out: exports that transformers loads, and the same text whoever generates it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bootstrap.evaluation import Loss, checkpoint_loss, evaluate_route
from bootstrap.export.exporting import PARTIAL, Exported, Order, export
from bootstrap.export.sources import Donor, choose
from bootstrap.export.tokenizer import ids_of, run_tokenizer
from bootstrap.generate_cli import first_tokens
from bootstrap.generation.decoding import Decoding
from bootstrap.generation.exported import generate_tokens, load_exported
from bootstrap.generation.swarm_answer import SwarmAnswer
from bootstrap.generation.text_stream import TextStream
from bootstrap.measured_text import held_out_text
from bootstrap.observer import Observer
from bootstrap.simulated_swarm import SimulatedSwarm
from node.daemon import Node
from node.model.replica import Replica
from protocol.errors import DataError, JoinError
from protocol.identity import Identity
from protocol.manifest import SignedManifest
from protocol.messages import GetStatePiece, StatePiece
from protocol.rpc import Answer, Request, Traffic
from protocol.transport.memory import memory_address
from tests.swarm.micro import (
    FOREVER,
    everyone_goes_on,
    guest_of,
    micro_swarm,
    peer_of,
    run_swarm,
    stage_nodes,
    training,
    until,
)

PROMPT = "ethe sin"


async def observer_of(swarm: SimulatedSwarm, name: str = "visitor") -> Observer:
    rpc = await guest_of(swarm, name)
    await rpc.transport.connect([memory_address(swarm.seed_peer.transport.peer_id)], 5.0)
    return Observer(
        rpc.transport, rpc, SignedManifest.sign(swarm.manifest, Identity.from_seed("run", swarm.seed))
    )


async def finished(replicas: int, **settings: Any) -> SimulatedSwarm:
    """A swarm whose run is complete, its nodes still there."""
    swarm: SimulatedSwarm = micro_swarm(**settings)
    await swarm.start(replicas)
    await until(
        lambda: (
            len(swarm.nodes) > 0 and all(node.public_state == "finished" for node in swarm.nodes.values())
        ),
        step=0.5,
    )
    return swarm


def visiting(replicas: int, look: Any, **settings: Any) -> Any:
    """What `look(swarm, observer)` returns of a finished swarm."""

    async def main() -> Any:
        swarm = await finished(replicas, **settings)
        try:
            return await look(swarm, await observer_of(swarm))
        finally:
            await swarm.leave()

    return run_swarm(main())


async def said_by_swarm(observer: Observer, decoding: Decoding, prompt: str = PROMPT, **more: Any) -> str:
    tokenizer = run_tokenizer(observer.manifest, None)
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


@pytest.mark.parametrize("kv_heads", [0, 1])
def test_an_export_is_the_swarms_model_and_says_what_the_swarm_says(kv_heads: int, tmp_path: Path) -> None:
    async def look(swarm: SimulatedSwarm, observer: Observer) -> tuple[Loss, list[str]]:
        route = (await observer.routes())[0]
        await export(observer, Order(tmp_path, route=route, shard_size="8KB"))
        text = held_out_text(swarm.manifest, swarm.corpus, 16, run_tokenizer(swarm.manifest, None))
        assert (
            abs((await evaluate_route(observer, text, route)).nats - checkpoint_loss(tmp_path, text).nats)
            < 1e-3
        )
        return text, [await said_by_swarm(observer, decoding) for decoding in (GREEDY, SAMPLED)]

    _, (greedy, sampled) = visiting(2, look, model__kv_heads=kv_heads)
    assert greedy == said_by_export(tmp_path, GREEDY)
    assert sampled == said_by_export(tmp_path, SAMPLED)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    inputs = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False)
    told = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0]
    assert greedy == tokenizer.decode(told[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert len(greedy) == 20
    assert sampled != greedy
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    assert not (tmp_path / PARTIAL).exists()
    card = (tmp_path / "README.md").read_text()
    assert "[outer]" in card
    assert "training loss" in card
