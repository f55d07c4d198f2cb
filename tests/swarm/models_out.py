"""A finished swarm of a micro model, and what it and its export say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bootstrap.export.tokenizer import tokenizer_of_run
from bootstrap.generation.decoding import Decoding
from bootstrap.generation.exported import generate_tokens, load_exported
from bootstrap.generation.swarm_answer import SwarmAnswer
from bootstrap.generation.writing import TextStream, first_tokens
from bootstrap.inspect.observer import Observer
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from tests.swarm.micro import micro_swarm, observer_of, run_swarm, until

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


def contents_of(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}
