"""Copies on disk are donors of last resort: the seed peer's, and those of nodes that served the stage before."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.membership.past import Past, Remembered
from node.model.stage import parameter_count
from node.state import copy_keeper
from node.state.copies import OfferedCopy, chosen, is_recent
from node.state.copy_keeper import copies_in
from node.state.transfer import RunLimits
from node.storage.state_directory import StateDirectory
from protocol.errors import Refused
from protocol.ground import PeerId
from protocol.messages.peers import PastRecord
from protocol.messages.state import Copies, GetCopies, GetCopyPiece, StageCopy
from protocol.records.lineage import Lineage
from protocol.rpc.rpc import Answer, Request
from tests.swarm.micro import events_of, everyone_goes_on, guest_of, peer_of, run_swarm, step_of, until
from tests.swarm.test_nothing_is_lost import A, B, C, leave, recent_loss, three_friends

D = 3  # a node that keeps copies
EVERY = 20.0  # seconds, that copies are made here
BEGINNING = Lineage(0, 100.0)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_keeper, "LEAST_SECONDS", EVERY)
    monkeypatch.setattr(copy_keeper, "LOOK_SECONDS", 2.0)


async def kept_by_seed(directory: Path) -> SimulatedSwarm:
    """Three friends whose seed peer keeps copies."""
    swarm = await three_friends(directory)
    (directory / "seed").mkdir()
    swarm.seed_peer.keep_copies(copies_in(directory / "seed"))
    swarm.seed_peer.tell_newcomers()
    await asyncio.sleep(EVERY + 5)
    return swarm


def copied_steps(swarm: SimulatedSwarm, directory: Path) -> dict[int, int]:
    kept = copies_in(directory / "seed").kept(swarm.seed_peer.signed.run_id)
    return {one.stage: one.step for one in kept}


def test_a_stage_of_more_than_a_megabyte_is_copied(tmp_path: Path) -> None:
    """Failed before: its pieces were too long an answer for the seed peer, which banned its members one by one."""

    async def main() -> None:
        swarm = await three_friends(tmp_path, step=2, model__intermediate_size=2_048)
        assert min(parameter_count(swarm.manifest, stage) for stage in (0, 1)) > 2**16
        (tmp_path / "seed").mkdir()
        swarm.seed_peer.keep_copies(copies_in(tmp_path / "seed"))
        await until(lambda: copied_steps(swarm, tmp_path).keys() == {0, 1}, 20.0, step=0.5)
        await swarm.leave()

    run_swarm(main())


def test_three_laptops_that_all_close_and_lose_their_disks_go_on_from_the_seeds_copies(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        swarm = await kept_by_seed(tmp_path)
        before = recent_loss(swarm)
        assert copied_steps(swarm, tmp_path).keys() == {0, 1}
        for number in (A, B, C):
            await leave(swarm, number)
        await asyncio.sleep(60)
        copied = copied_steps(swarm, tmp_path)
        for number, stage in ((7, 0), (8, 1)):  # other machines
            swarm.add(number, stage=stage)
        await everyone_goes_on(swarm, 20)
        assert not events_of(swarm, "waiting-for-stage")  # it is so recent that nobody is missed
        taken = {e["stage"]: e["step"] for e in events_of(swarm, "copy-taken")}
        assert taken == copied
        assert recent_loss(swarm) < before + 0.1
        swarm.add(C, stage=0)
        await everyone_goes_on(swarm, 30)
        assert swarm.nodes[C].replica.lineage.is_same(swarm.nodes[7].replica.lineage, 6.0)
        await swarm.leave()

    run_swarm(main())


def test_a_node_that_served_the_stage_before_gives_it_to_whoever_comes(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await three_friends(tmp_path)
        await asyncio.sleep(20)
        await leave(swarm, A)
        swarm.add(A, stage=1)  # it has both stages on its disk from now on
        await until(lambda: swarm.nodes[A].public_state == "serving")
        await leave(swarm, C)
        swarm.add(7, stage=0)
        await everyone_goes_on(swarm, 20)
        [taken] = events_of(swarm, "copy-taken", 7)
        assert taken["peer"] == peer_of(swarm.nodes[A])
        await swarm.leave()

    run_swarm(main())


def test_a_paused_node_gives_its_stage_to_who_comes_meanwhile(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await three_friends(tmp_path)
        await asyncio.sleep(20)
        swarm.nodes[B].rest.ask("volunteer", "you asked for it.")
        await until(lambda: bool(events_of(swarm, "paused", B)))
        assert [e["stage"] for e in events_of(swarm, "last-replica", B)] == [1]
        swarm.add(7, stage=1)
        await everyone_goes_on_but(swarm, B)
        swarm.nodes[B].rest.lift("volunteer")
        await until(lambda: swarm.nodes[B].stage == 1 and swarm.nodes[B].public_state == "serving")
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())


async def everyone_goes_on_but(swarm: SimulatedSwarm, number: int, steps: int = 10) -> None:
    others = {n: step_of(node) + steps for n, node in swarm.nodes.items() if n != number}
    await until(lambda: all(step_of(swarm.nodes[n]) >= goal for n, goal in others.items()))


def test_a_copy_is_given_in_pieces_and_what_is_not_there_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await kept_by_seed(tmp_path)
        guest = await guest_of(swarm)
        seed = swarm.seed_peer.transport.peer_id
        answer, _ = await guest.call(seed, GetCopies(stages=[0, 1, 7]), deadline=5.0)
        copy = next(one for one in answer.copies if one.stage == 0)
        asked = GetCopyPiece(stage=0, beginning=copy.beginning, step=copy.step, index=0)
        _, tensors = await guest.call(seed, asked, deadline=5.0)
        assert [len(tensor) for tensor in tensors] == [copy.parameters] * 4
        assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
        for bad in ({"step": copy.step + 1}, {"stage": 7}, {"beginning": 3}, {"index": 10**6}):
            with pytest.raises(Refused):
                await guest.call(seed, asked.model_copy(update=bad), deadline=5.0)
        await swarm.leave()

    run_swarm(main())


def test_a_keeper_asks_for_little_of_the_network(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await kept_by_seed(tmp_path)
        first = copied_steps(swarm, tmp_path)
        await asyncio.sleep(EVERY / 2)
        assert copied_steps(swarm, tmp_path) == first
        await asyncio.sleep(EVERY)
        assert copied_steps(swarm, tmp_path)[0] > first[0]
        await swarm.leave()

    run_swarm(main())


# --- a node that keeps copies -------------------------------------------------------------------


def copies_of_node(swarm: SimulatedSwarm, directory: Path, number: int) -> dict[int, int]:
    """The steps of the copies that a node keeps, by stage."""
    place = directory / f"node-{number}" / "copies"
    kept = StateDirectory(place).kept(swarm.seed_peer.signed.run_id)
    return {one.stage: one.step for one in kept}


def test_a_node_that_keeps_copies_gives_a_stage_that_it_never_served(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await three_friends(tmp_path)
        swarm.add(D, stage=1, keep=True)
        await until(lambda: copies_of_node(swarm, tmp_path, D).keys() == {0, 1})
        await asyncio.sleep(2 * EVERY)
        await leave(swarm, A)
        await leave(swarm, C)
        await asyncio.sleep(20)
        kept = copies_of_node(swarm, tmp_path, D)
        swarm.add(7, stage=0)  # another machine
        await everyone_goes_on(swarm, 20)
        [taken] = events_of(swarm, "copy-taken", 7)
        assert (taken["peer"], taken["step"]) == (peer_of(swarm.nodes[D]), kept[0])
        assert not events_of(swarm, "begun-anew")
        await swarm.leave()

    run_swarm(main())


def test_a_paused_node_fetches_no_copies_and_gives_those_that_it_has(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await three_friends(tmp_path)
        swarm.add(D, stage=1, keep=True)
        await until(lambda: copies_of_node(swarm, tmp_path, D).keys() == {0, 1})
        swarm.nodes[D].rest.ask("volunteer", "you asked for it.")
        await until(lambda: bool(events_of(swarm, "paused", D)))
        kept = copies_of_node(swarm, tmp_path, D)
        await asyncio.sleep(5 * EVERY)
        assert copies_of_node(swarm, tmp_path, D) == kept
        guest = await guest_of(swarm)
        keeper = peer_of(swarm.nodes[D])
        await guest.transport.connect(swarm.nodes[D].transport.addresses(), 5.0)
        answer, _ = await guest.call(keeper, GetCopies(stages=[0]), deadline=5.0)
        assert [copy.step for copy in answer.copies] == [kept[0]]
        swarm.nodes[D].rest.lift("volunteer")
        await until(lambda: copies_of_node(swarm, tmp_path, D)[0] > kept[0])
        await swarm.leave()

    run_swarm(main())


# --- which copy is taken ------------------------------------------------------------------------


def remembered(step: int, peer: str = "p", lineage: Lineage = BEGINNING, seen: float = 1_000.0) -> Remembered:
    return Remembered(PastRecord(peer, 0, 0, b"", seen, seen - 60), step, step // 5, lineage)


def offer(step: int, beginning: int = 0, begun: float = 100.0, saved: float = 900.0) -> StageCopy:
    return StageCopy(0, step, step // 5, 10, beginning, begun, saved)


def test_the_furthest_copy_of_the_oldest_lineage_is_taken() -> None:
    past = [remembered(486), remembered(30, lineage=Lineage(1, 900.0))]
    one, other = PeerId("one"), PeerId("other")
    offers = {one: [offer(480), offer(20, 1, 900.0)], other: [offer(470), offer(480)]}
    found = chosen(offers, past, 6.0)
    assert found is not None
    assert (found.copy.step, found.peers) == (480, (one, other))


def test_whoever_offers_the_same_step_of_another_round_or_beginning_spoils_no_copy_of_others() -> None:
    """Failed before: the first one's round was asked of all, and honest pieces of another counted as breaches."""
    past, peers = [remembered(486)], [PeerId(name) for name in ("liar", "another", "one", "other")]
    true = offer(480)
    lies = true._replace(round=1), true._replace(begun=0.0)
    offers = dict(zip(peers, ([lies[0]], [lies[1], lies[1]], [true], [true]), strict=True))
    assert chosen(offers, past, 6.0) == OfferedCopy(true, (peers[2], peers[3]))


def test_a_copy_of_more_rounds_than_steps_or_beyond_the_runs_end_is_none() -> None:
    limits = RunLimits(most_steps=500, inner_steps=5)
    assert limits.allow(480, 96)
    assert not limits.allow(480, 10**12)
    assert not limits.allow(501, 96)


def test_whoever_offers_the_furthest_copy_and_gives_none_costs_nobody_the_copy_of_another(
    tmp_path: Path,
) -> None:
    """Failed before: the stage was begun anew, with a sound copy at the seed peer."""

    async def main() -> None:
        swarm = await kept_by_seed(tmp_path)
        for number in (A, B, C):
            await leave(swarm, number)
        copied = copied_steps(swarm, tmp_path)
        guest = await guest_of(swarm, "liar")
        await guest.start()
        sizes = {stage: parameter_count(swarm.manifest, stage) for stage in copied}

        async def on_copies(request: Request[GetCopies]) -> Answer[Copies]:
            stages = request.message.stages
            further = [StageCopy(s, copied[s] + 1, 1, sizes[s], 0, 0.0, 1e15) for s in stages]
            return Answer(Copies(copies=further))

        guest.handle(GetCopies.answered_by(on_copies))
        swarm.add(7, stage=0)
        await until(lambda: 7 in swarm.nodes)
        await guest.transport.connect(swarm.nodes[7].transport.addresses(), 5.0)
        await until(lambda: bool(events_of(swarm, "copy-taken", 7)))
        assert events_of(swarm, "copy-failed", 7)
        assert [e["step"] for e in events_of(swarm, "copy-taken", 7)] == [copied[0]]
        await swarm.leave()

    run_swarm(main())


@pytest.mark.parametrize("copy", [offer(10**9), offer(0), offer(480, beginning=2), offer(480, begun=5_000.0)])
def test_a_copy_that_the_past_does_not_bear_out_is_none(copy: StageCopy) -> None:
    assert chosen({PeerId("liar"): [copy]}, [remembered(486)], 6.0) is None
    assert chosen({PeerId("liar"): [copy]}, [], 6.0) is None


def test_a_copy_of_minutes_before_is_not_waited_beyond() -> None:
    past = remembered(10_000, seen=10_000.0)
    assert is_recent(9_990, 0.0, past, inner_steps=5)
    assert is_recent(100, 9_500.0, past, inner_steps=5)
    assert not is_recent(100, 5_000.0, past, inner_steps=5)


def test_what_a_node_remembers_is_bounded() -> None:
    past = Past("run", lambda _: 100, 6.0, lambda: 0.0)
    assert past.shown([0]) == []
    past.take_up(b"\xff" * 100)
    past.take_up(b"")
    assert past.of(0) == []
