"""A model that transformers has saved, trained by a swarm, and exported for transformers again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bootstrap.creating.choosing import model_of, unread_start, with_digests
from bootstrap.evaluation.measuring import (
    MeasuredText,
    checkpoint_loss,
    evaluate_route,
    held_out_text,
    model_loss,
    starting_loss,
)
from bootstrap.export.exporting import export
from bootstrap.export.model_config import FAMILIES
from bootstrap.export.order import ExportOrder
from bootstrap.export.tokenizer import tokenizer_of_run
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.model.pretrained import Pretrained
from protocol.codecs.codec import encode
from protocol.errors import CheckpointError, Refused
from protocol.messages.state import GetStatePiece
from protocol.messages.training import Evaluate, Predict
from protocol.run.manifest import Manifest, manifest_from
from protocol.run.model import Family
from tests.pretrained import saved_model
from tests.swarm.measured import measured
from tests.swarm.micro import (
    FOREVER,
    WIDE,
    events_of,
    everyone_goes_on,
    everyone_reaches,
    fails_to_join,
    mean_losses,
    micro_corpus,
    micro_manifest,
    observer_of,
    peer_of,
    run_swarm,
    until,
)
from tests.unset_memory import unset_memory_is_nan

SEQUENCES = 16
KINDS: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied llama": ("llama", {"tie_word_embeddings": True}),
    "tied qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 8}),
}


def manifest_for(directory: Path, **changes: Any) -> Manifest:
    """The micro run with the model of the checkpoint there."""
    source = Pretrained(str(directory))
    contents = micro_manifest(**changes).model_dump()
    contents["model"] = model_of(source).model_dump()
    contents["start"] = unread_start(source, contents["stages"]).model_dump()
    return with_digests(source, manifest_from(contents))


def swarm_for(manifest: Manifest) -> SimulatedSwarm:
    return SimulatedSwarm(manifest, micro_corpus(), seed=1, link=WIDE)


async def all_are(swarm: SimulatedSwarm, state: str) -> None:
    await until(lambda: all(node.public_state == state for node in swarm.nodes.values()))


def text_of(manifest: Manifest) -> MeasuredText:
    return held_out_text(manifest, micro_corpus(), SEQUENCES, tokenizer_of_run(manifest, None))


@pytest.mark.long_but("llama-2", "qwen3-1")
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_from_transformers_through_a_swarm_and_back(kind: str, stages: int, tmp_path: Path) -> None:
    family, settings = KINDS[kind]
    whole = saved_model(tmp_path / "model", family, **settings)
    manifest = manifest_for(tmp_path / "model", stages=stages, inner__total_steps=20)

    async def main() -> float:
        swarm = swarm_for(manifest)
        await swarm.start(2, from_checkpoint=str(tmp_path / "model"))
        await all_are(swarm, "finished")
        observer = await observer_of(swarm)
        route = (await observer.routes())[0]
        own = await evaluate_route(observer, text_of(manifest), route)
        await export(observer, ExportOrder(tmp_path / "export", route=route))
        await observer.rpc.close()
        await swarm.leave()
        return own.nats

    own = run_swarm(main())
    assert own < model_loss(whole, text_of(manifest)).nats - 0.2
    back = checkpoint_loss(tmp_path / "export", text_of(manifest))
    assert back.nats == pytest.approx(own, abs=1e-3)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["architectures"] == [FAMILIES[family]]
    assert config["tie_word_embeddings"] is manifest.model.tied_embeddings


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_where_a_run_starts_is_told_by_its_own_stages_as_transformers_would(
    kind: str, stages: int, tmp_path: Path
) -> None:
    family, settings = KINDS[kind]
    whole = saved_model(tmp_path / "model", family, **settings)
    manifest = manifest_for(tmp_path / "model", stages=stages)
    told = starting_loss(manifest, text_of(manifest), str(tmp_path / "model"))
    assert told.nats == pytest.approx(model_loss(whole, text_of(manifest)).nats, rel=1e-5)
    assert told.nats != pytest.approx(starting_loss(manifest, text_of(manifest)).nats, rel=1e-4)


@pytest.mark.long_but("llama-adamw-auto-fp32", "llama-muon-on-fp32", "tied llama-muon-auto-bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["auto", "on"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kind", ["llama", "tied llama"])
def test_whatever_memory_held_before_the_weights_nodes_and_a_later_joiner_train(
    kind: str, optimizer: str, recompute: str, precision: str, tmp_path: Path
) -> None:
    """Each measures its memory before it has them, as a daemon does."""
    family, shape = KINDS[kind]
    saved_model(tmp_path / "model", family, **shape)
    manifest = manifest_for(tmp_path / "model", inner__total_steps=FOREVER, inner__optimizer=optimizer)

    async def main() -> None:
        swarm = swarm_for(manifest)
        folder = str(tmp_path / "model")
        settings: dict[str, Any] = {"recompute": recompute, "precision": precision}
        await swarm.start(1, from_checkpoint=folder, replica=measured, **settings)
        await everyone_reaches(swarm, 15)
        swarm.add(2, stage=1, replica=measured, **settings)
        swarm.add(3, stage=0, replica=measured, **settings)
        await until(lambda: len(events_of(swarm, "downloaded")) == 2)
        await everyone_goes_on(swarm)
        assert {event["node"] for event in events_of(swarm, "initialised")} == {0, 1}
        assert not events_of(swarm, "step-left-out")
        assert not events_of(swarm, "non-finite")
        first, last = mean_losses(swarm, 4, 4)
        assert last < first
        await swarm.leave()

    with unset_memory_is_nan():
        run_swarm(main())


def test_a_replica_that_waits_for_weights_gives_none(tmp_path: Path) -> None:
    saved_model(tmp_path / "model")

    async def main() -> None:
        swarm = swarm_for(manifest_for(tmp_path / "model"))
        await swarm.start(1)
        await until(lambda: len(events_of(swarm, "no-weights")) == 2)
        observer = await observer_of(swarm)
        sequence = [encode(torch.zeros(1, 4, dtype=torch.int32), "int32")]
        for request, tensors in (
            (GetStatePiece(stage=0, index=0, moments=True), []),
            (Predict(stage=0, route=[peer_of(swarm.nodes[1])], answer="a", position=0, top=1), sequence),
            (Evaluate(stage=0, route=[peer_of(swarm.nodes[1])]), sequence * 2),
        ):
            with pytest.raises(Refused, match="no weights yet"):
                await observer.rpc.call(peer_of(swarm.nodes[0]), request, tensors, deadline=5.0)
        await observer.rpc.close()
        await swarm.leave()

    run_swarm(main())


def test_a_replica_without_the_checkpoint_waits_for_one_that_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_model(tmp_path / "model")
    manifest = manifest_for(tmp_path / "model", inner__total_steps=FOREVER)

    async def main() -> None:
        swarm = swarm_for(manifest)
        await swarm.start(1)
        await until(lambda: len(events_of(swarm, "no-weights")) == 2)
        await asyncio.sleep(30)
        assert not events_of(swarm, "serving")
        for stage in range(2):
            swarm.add(2 + stage, stage=stage, from_checkpoint=str(tmp_path / "model"))
        await until(lambda: len(events_of(swarm, "serving")) == 4)
        assert {event["node"] for event in events_of(swarm, "downloaded")} == {0, 1}
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())
    for stage in range(2):
        waits = f"Waiting for another replica of stage {stage}: the run starts from 'model'"
        assert len([said for said in caplog.messages if waits in said and "--from-checkpoint" in said]) == 1


def test_a_node_that_waits_for_weights_leaves_when_it_is_told_to(tmp_path: Path) -> None:
    saved_model(tmp_path / "model")
    manifest = manifest_for(tmp_path / "model")

    async def main() -> None:
        swarm = SimulatedSwarm(manifest, micro_corpus(), seed=1, link=WIDE, directory=tmp_path / "states")
        await swarm.start(1)
        await until(lambda: len(events_of(swarm, "no-weights")) == 2)
        await swarm.leave()

    run_swarm(main())
    assert not list(tmp_path.rglob("checkpoint-*.safetensors"))  # what it held was no model


def test_a_checkpoint_is_refused_in_a_run_that_starts_from_random_weights(tmp_path: Path) -> None:
    saved_model(tmp_path / "model")

    async def main() -> None:
        swarm = swarm_for(micro_manifest())
        await swarm.seed_peer.start()
        swarm.add(0, stage=1, from_checkpoint=str(tmp_path / "model"))
        failure = await fails_to_join(swarm, 0)
        assert isinstance(failure, CheckpointError)
        assert "starts from random weights" in str(failure)
        await swarm.leave()

    run_swarm(main())


def test_another_checkpoint_is_refused_where_it_would_be_needed(tmp_path: Path) -> None:
    saved_model(tmp_path / "model")
    manifest = manifest_for(tmp_path / "model")
    saved_model(tmp_path / "other", initializer_range=0.1)

    async def main() -> None:
        swarm = swarm_for(manifest)
        await swarm.seed_peer.start()
        swarm.add(0, stage=1, from_checkpoint=str(tmp_path / "other"))
        failure = await fails_to_join(swarm, 0)
        assert isinstance(failure, CheckpointError)
        assert "the weights of stage 1 differ" in str(failure)
        await swarm.leave()

    run_swarm(main())
