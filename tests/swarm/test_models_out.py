"""A trained swarm's model taken out: exports that transformers loads, and the same text whoever generates it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from bootstrap.evaluation.measuring import (
    checkpoint_loss,
    evaluate_route,
    held_out_text,
    text_of_files,
)
from bootstrap.export.exporting import export
from bootstrap.export.folder import PARTIAL
from bootstrap.export.order import ExportOrder
from bootstrap.export.tokenizer import tokenizer_of_run
from bootstrap.inspect.observer import Observer
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from tests.swarm.micro import guest_of, stage_nodes
from tests.swarm.models_out import (
    GREEDY,
    MODELS,
    PROMPT,
    SAMPLED,
    said_by_export,
    said_by_swarm,
    visiting,
)


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
