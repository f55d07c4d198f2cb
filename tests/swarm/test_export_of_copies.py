"""`noloco export` of a run that nobody trains: the weights come from copies that peers keep on their disks."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bootstrap.export.checkpoint import weights_of
from bootstrap.export.exporting import export
from bootstrap.export.fetching import StageFile
from bootstrap.export.order import ExportOrder
from bootstrap.inspect.observer import Observer
from bootstrap.inspect.status import Watching
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.state import copy_keeper
from node.state.copies import CopyService
from node.state.copy_keeper import copies_in
from node.storage.checkpoint_files import path_of, read
from protocol.errors import JoinError, Refused
from protocol.messages.state import Copies, GetCopies, GetCopyPiece, StageCopy, StatePiece
from protocol.rpc.rpc import Answer, Request
from tests.swarm.micro import events_of, observer_of, peer_of, run_swarm, until
from tests.swarm.test_copies import EVERY, kept_by_seed
from tests.swarm.test_nothing_is_lost import A, B, C, leave, three_friends


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_keeper, "LEAST_SECONDS", EVERY)
    monkeypatch.setattr(copy_keeper, "LOOK_SECONDS", 2.0)


def kept_in(directory: Path, stages: int = 2) -> dict[int, torch.Tensor]:
    """φ by stage, of the checkpoints in a directory."""
    return {stage: read(path_of(directory, stage))[1].state.phi for stage in range(stages)}


def stages_of(swarm: SimulatedSwarm, directory: Path) -> dict[int, torch.Tensor]:
    """φ by stage, of an export."""
    tensors = load_file(directory / "model.safetensors")
    weights, stages = weights_of(swarm.manifest), dict[int, list[torch.Tensor]]()
    for name, weight in weights.items():
        stages.setdefault(weight.stage, []).append(tensors[name].flatten())
    return {stage: torch.cat(parts) for stage, parts in stages.items()}


async def exported(observer: Observer, directory: Path) -> tuple[list[str], dict[int, dict[str, Any]]]:
    """What the command says, and what noloco.json says of each stage."""
    said: list[str] = []
    await export(observer, ExportOrder(directory), tell=said.append)
    facts = json.loads((directory / "noloco.json").read_text())
    return said, {stage["stage"]: stage for stage in facts["stages"]}


def test_what_three_friends_who_left_have_trained_is_exported_from_the_seeds_copies(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await kept_by_seed(tmp_path)
        for number in (A, B, C):
            await leave(swarm, number)
        await asyncio.sleep(60)
        seed = swarm.seed_peer.transport.peer_id
        status = await Watching(await observer_of(swarm, "watcher")).look(is_first=True)
        [nobody] = [finding.sentence for finding in status.findings if finding.kind == "nobody"]
        assert re.search(
            rf"nobody trains; …{seed[-8:]} has copies of all stages \(step .*, .* ago\)$", nobody
        )
        said, facts = await exported(await observer_of(swarm), tmp_path / "model")
        kept = kept_in(tmp_path / "seed" / "copies")
        assert all(
            torch.equal(phi, kept[stage]) for stage, phi in stages_of(swarm, tmp_path / "model").items()
        )
        for stage in (0, 1):
            header = read(path_of(tmp_path / "seed" / "copies", stage))[1]
            [replica] = facts[stage]["replicas"]
            assert (replica["peer"], replica["step"]) == (seed, header.state.step)
            assert facts[stage]["copy_saved"] == header.saved
            told = f"Stage {stage} from the copy that …{seed[-8:]} keeps, step {header.state.step}, saved "
            assert any(line.startswith(told) and "nobody serves it" in line for line in said)
            assert f"Nobody served stage {stage}" in (tmp_path / "model" / "README.md").read_text()
        await swarm.leave()

    run_swarm(main())


def test_a_stage_that_is_served_comes_from_its_replica_and_the_other_from_a_copy(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await kept_by_seed(tmp_path)
        await leave(swarm, B)
        await asyncio.sleep(30)
        _, facts = await exported(await observer_of(swarm), tmp_path / "model")
        assert {stage: "copy_saved" in fact for stage, fact in facts.items()} == {0: False, 1: True}
        kept = kept_in(tmp_path / "seed" / "copies")
        assert torch.equal(stages_of(swarm, tmp_path / "model")[1], kept[1])
        await swarm.leave()

    run_swarm(main())


def test_a_paused_node_gives_its_stage_to_an_export(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await three_friends(tmp_path)
        await asyncio.sleep(20)
        swarm.nodes[B].rest.ask("volunteer", "you asked for it.")
        await until(lambda: bool(events_of(swarm, "paused", B)))
        await asyncio.sleep(20)
        said, facts = await exported(await observer_of(swarm), tmp_path / "model")
        assert "copy_saved" in facts[1], said
        assert facts[1]["replicas"][0]["peer"] == peer_of(swarm.nodes[B])
        saved = read(path_of(tmp_path / f"node-{B}", 1))[1]
        assert torch.equal(stages_of(swarm, tmp_path / "model")[1], saved.state.phi)
        await swarm.leave()

    run_swarm(main())


def test_an_export_from_copies_that_was_cut_short_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        swarm = await kept_by_seed(tmp_path)
        for number in (A, B, C):
            await leave(swarm, number)
        await asyncio.sleep(60)
        observer = await observer_of(swarm)
        with monkeypatch.context() as broken:
            broken.setattr("bootstrap.export.exporting._finish", _stopped)
            with pytest.raises(KeyboardInterrupt):
                await exported(observer, tmp_path / "model")
        with monkeypatch.context() as watched:
            watched.setattr(StageFile, "store", _stored_again)
            said, _ = await exported(observer, tmp_path / "model")
        assert sum("1 of its 1 pieces are here already" in line for line in said) == 2
        kept = kept_in(tmp_path / "seed" / "copies")
        assert all(
            torch.equal(phi, kept[stage]) for stage, phi in stages_of(swarm, tmp_path / "model").items()
        )
        await swarm.leave()

    run_swarm(main())


def _stopped(*_: object) -> None:
    raise KeyboardInterrupt


def _stored_again(*_: object) -> None:
    raise AssertionError("a piece that is here was fetched again")


def offers(swarm: SimulatedSwarm, step: int) -> None:
    """Have the seed peer offer a copy of each stage at this step."""

    async def on_copies(request: Request[GetCopies]) -> Answer[Copies]:
        manifest = swarm.manifest
        sizes = [
            sum(w.place.stop - w.place.start for w in weights_of(manifest).values() if w.stage == s)
            for s in (0, 1)
        ]
        return Answer(
            Copies(
                copies=[StageCopy(s, step, step // 5, sizes[s], 0, 0.0, 1.0) for s in request.message.stages]
            )
        )

    swarm.seed_peer.rpc.handle(GetCopies.answered_by(on_copies))


@pytest.mark.parametrize("is_remembered", [False, True])
def test_a_copy_that_nobodys_past_bears_out_is_not_exported(is_remembered: bool, tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await three_friends(tmp_path)
        if is_remembered:
            swarm.seed_peer.tell_newcomers()
            await asyncio.sleep(20)
        for number in (A, B, C):
            await leave(swarm, number)
        await asyncio.sleep(60)
        offers(swarm, 10**9)
        why = "does not bear it out"
        if not is_remembered:  # but the seed peer may have read a record of the stage by itself
            why = f"({why}|no peer that answers remembers who had the stage)"
        with pytest.raises(
            JoinError, match=f"offers a copy at step 1,000,000,000, which is not taken: .*{why}"
        ):
            await exported(await observer_of(swarm), tmp_path / "model")
        assert not (tmp_path / "model" / "config.json").exists()
        await swarm.leave()

    run_swarm(main())


def test_a_peer_that_gives_no_piece_of_its_copy_is_left_for_another_one(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await kept_by_seed(tmp_path)
        for number in (A, B, C):
            await leave(swarm, number)
        await asyncio.sleep(60)
        observer = await observer_of(swarm)
        swarm.seed_peer.rpc.handle(GetCopyPiece.answered_by(_refuses))
        with pytest.raises(JoinError, match="nobody serves it"):
            await exported(observer, tmp_path / "model")
        CopyService(swarm.seed_peer.rpc, observer.signed.run_id, [copies_in(tmp_path / "seed")]).serve()
        await exported(observer, tmp_path / "model")
        await swarm.leave()

    run_swarm(main())


async def _refuses(_: Request[GetCopyPiece]) -> Answer[StatePiece]:
    raise Refused("no-copy")
