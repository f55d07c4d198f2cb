"""Whole swarms in one process, from the daemon's own code: they train, and they survive what volunteers do.

All times are virtual. The same seed gives the same run, so nothing here is flaky.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bootstrap.simulated_swarm import SimulatedSwarm
from node.daemon import Node
from node.pairing import Pair
from node.replica import Pieces, Replica, digest_of
from protocol.announcement import parse_announcement, stage_key
from protocol.codec import encode
from protocol.errors import ClockError, JoinError, NolocoError, Refused, StateError, TransportDown
from protocol.identity import Identity
from protocol.messages import Forward, GetStats, Gradient, NodeStats, Propose
from protocol.rpc import Rpc, Traffic
from protocol.transport.base import PeerId, Stream
from protocol.transport.memory import MemoryTransport, memory_address
from protocol.transport.memory_link import Link
from tests.swarm.micro import (
    all_reached,
    events_of,
    mean_losses,
    micro_manifest,
    micro_swarm,
    run_swarm,
    stage_nodes,
    step_of,
    true_spread,
    until,
)

FOREVER = 10_000  # inner steps: more than any test waits for


async def trained(replicas: int, **settings: Any) -> SimulatedSwarm:
    """A swarm that was trained to its end."""
    swarm: SimulatedSwarm = micro_swarm(**settings)
    await swarm.start(replicas)
    await swarm.finish()
    return swarm


async def training(replicas: int, step: int = 5, **settings: Any) -> SimulatedSwarm:
    """A swarm in which every node has done `step` inner steps."""
    swarm: SimulatedSwarm = micro_swarm(**settings)
    await swarm.start(replicas)
    await everyone_reaches(swarm, step)
    return swarm


async def everyone_reaches(swarm: SimulatedSwarm, step: int) -> None:
    await until(lambda: all_reached(swarm.nodes.values(), step))


async def everyone_goes_on(swarm: SimulatedSwarm, steps: int = 10) -> None:
    """Each living node does that many more inner steps."""
    goals = {number: step_of(node) + steps for number, node in swarm.nodes.items()}
    await until(lambda: all(step_of(swarm.nodes[number]) >= goal for number, goal in goals.items()))


async def guest_of(swarm: SimulatedSwarm, name: str = "guest") -> Rpc:
    """A peer that is no node: it talks to the members as it pleases."""
    transport = MemoryTransport(swarm.network, Identity.from_seed(name))
    await transport.start()
    return Rpc(transport)


def peer_of(node: Node) -> PeerId:
    return node.transport.peer_id


def numbers_of_stage(swarm: SimulatedSwarm, stage: int) -> list[int]:
    return [number for number, node in swarm.nodes.items() if node.context.stage == stage]


# --- it trains ----------------------------------------------------------------------------------


def test_sixteen_nodes_train_and_the_same_seed_gives_the_same_run_event_for_event() -> None:
    logs = [run_swarm(trained(8, seed=seed, inner__total_steps=15)).events for seed in (1, 1, 2)]
    assert logs[0] == logs[1]
    assert logs[0] != logs[2]
    assert len({event["node"] for event in logs[0] if event["event"] == "finished"}) == 16


def fingerprint_of_a_run() -> str:
    swarm = run_swarm(trained(2, inner__total_steps=10))
    log = hashlib.sha256(repr(swarm.events).encode()).hexdigest()
    return f"{log} {digest_of([Replica(swarm.manifest, 0).phi]).hex()}"


def test_another_process_draws_the_same_weights_and_sees_the_same_run() -> None:
    script = "from tests.swarm.test_swarm import fingerprint_of_a_run; print(fingerprint_of_a_run())"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    there = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    assert there.stdout.strip() == fingerprint_of_a_run()


def test_the_loss_falls() -> None:
    swarm = run_swarm(trained(2, inner__total_steps=60))
    before, after = mean_losses(swarm, 10, 10)
    assert before > 5.0  # about ln 256
    assert after < 2.8  # the words are made of twelve letters and a space: ln 13 is 2.56


def test_an_odd_number_of_replicas_mix_and_stay_together() -> None:
    swarm = run_swarm(trained(3, inner__total_steps=100))
    for node in stage_nodes(swarm, 0):
        assert set(node.context.counters.sent) == {peer_of(other) for other in stage_nodes(swarm, 1)}
    for node in swarm.nodes.values():
        assert len(node.context.counters.partners) == 2
    for stage in (0, 1):
        nodes = stage_nodes(swarm, stage)
        start = Replica(swarm.manifest, stage).phi
        moved = float((nodes[0].replica.phi - start).square().mean().sqrt())
        assert 0 < true_spread(nodes) < 0.2 * moved


def test_the_live_estimate_of_the_spread_is_near_the_truth() -> None:
    async def main() -> None:
        swarm = await training(3, step=40, stages=1, inner__total_steps=FOREVER)
        true, estimated = [], []
        for _ in range(24):
            await asyncio.sleep(0.25)
            true.append(true_spread(swarm.nodes.values()))
            estimated += [node.context.counters.spread for node in swarm.nodes.values()]
        ratio = (sum(estimated) / len(estimated)) / (sum(true) / len(true))
        assert 0.6 < ratio < 1.7
        await swarm.leave()

    run_swarm(main())


@pytest.mark.parametrize("stages", [1, 3])
def test_other_numbers_of_stages_train_too(stages: int) -> None:
    swarm = run_swarm(trained(2, stages=stages, model__layers=3))
    before, after = mean_losses(swarm, 10, 10)
    assert after < before - 1
    assert all(node.replica.step >= 20 for node in swarm.nodes.values())


def test_a_swarm_with_no_faults_has_no_resends_and_blames_nobody() -> None:
    swarm = run_swarm(trained(3, inner__total_steps=100))
    assert not events_of(swarm, "resend")
    timeouts = [event for event in events_of(swarm, "exchange-failed") if event["reason"] != "Refused"]
    assert len(timeouts) <= 0.02 * len(events_of(swarm, "round"))


def test_a_slow_peer_gets_less_work_and_delays_nobody() -> None:
    async def main() -> SimulatedSwarm:
        swarm = micro_swarm(inner__total_steps=FOREVER)
        await swarm.seed_peer.start()
        for number in range(6):
            swarm.add(number, stage=number % 2, speed=0.1 if number == 1 else 1.0)
        await asyncio.sleep(12)
        await swarm.leave()
        return swarm

    swarm = run_swarm(main())
    slow, *fast = stage_nodes(swarm, 1)
    assert slow.replica.step > 0
    assert all(node.replica.step > 2 * slow.replica.step for node in fast)


def test_partners_pull_at_each_other_alike_also_with_a_lossy_codec() -> None:
    pulls: dict[int, torch.Tensor] = {}

    def remember(number: int, node: Node) -> None:
        finish = node.replica.finish_round_with

        def finish_and_remember(pull: Pieces) -> None:
            replica = node.replica
            pulls[number] = torch.cat([pull(i, replica.piece_bounds(i)) for i in range(replica.pieces)])
            finish(pull)

        node.replica.finish_round_with = finish_and_remember  # type: ignore[method-assign]

    async def main() -> None:
        swarm = await training(2, step=1, stages=1, wire__gossip="int8", inner__total_steps=FOREVER)
        for number, node in swarm.nodes.items():
            remember(number, node)
        await until(lambda: len([e for e in events_of(swarm, "round") if e["partner"]]) >= 2)
        await swarm.leave()

    run_swarm(main())
    assert torch.allclose(pulls[0], -pulls[1], atol=1e-6)


def test_a_proposal_at_the_very_end_of_a_round_is_kept_for_the_next_one() -> None:
    async def main() -> None:
        swarm = await training(1, stages=1, inner__total_steps=FOREVER)
        node = swarm.nodes[0]
        matchmaker = node._rounds.matchmaker
        partner = Identity.from_seed("partner").peer_id

        async def propose(name: str) -> None:
            times = {"opens_in": 0.0, "due_in": 0.0, "ends_in": 60.0, "step_seconds": 0.0}
            proposal = Propose(stage=0, round=node.replica.round, pair=name, **times)
            request: Any = SimpleNamespace(peer=partner, message=proposal)
            await matchmaker.on_propose(request)
            assert matchmaker.is_expected(name, partner)
            assert matchmaker.pair is None
            await until(lambda: matchmaker.pair == Pair(partner, name), seconds=1.0, step=0.005)

        finish = node.replica.finish_round_alone

        def finish_while_asked() -> None:
            asking.append(asyncio.get_running_loop().create_task(propose(f"p{len(asking)}")))
            finish()

        asking: list[asyncio.Task[None]] = []
        node.replica.finish_round_alone = finish_while_asked  # type: ignore[method-assign]
        await until(lambda: len(asking) >= 5)
        await asyncio.gather(*asking[:5])
        await swarm.leave()

    run_swarm(main())


# --- exactly the batch --------------------------------------------------------------------------


def assert_exact_admission(node: Node) -> None:
    batch = node.context.manifest.inner.microbatches
    unfinished = node.context.counters.received - node.replica.step * batch
    assert 0 <= unfinished <= batch


def test_each_step_takes_exactly_its_batch_also_when_streams_break() -> None:
    faulty = Link(latency=0.01, jitter=0.01, open_loss=0.02, write_loss=0.02)
    swarm = run_swarm(trained(3, link=faulty, stages=3, model__layers=3))
    assert events_of(swarm, "resend")
    for node in swarm.nodes.values():
        assert_exact_admission(node)


def microbatch(node: Node, seed: int = 0) -> list[torch.Tensor]:
    """Activations and labels that the node's stage accepts."""
    manifest = node.context.manifest
    shape = (manifest.inner.sequences, manifest.data.sequence_tokens)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 256, shape, generator=generator, dtype=torch.int32)
    return [torch.randn(*shape, manifest.model.hidden_size, generator=generator), labels]


async def forward(
    guest: Rpc, node: Node, tensors: list[torch.Tensor], name: str = "m", stage: int | None = None
) -> torch.Tensor:
    """Send a microbatch; returns the gradient."""
    parcel = [encode(tensor, "fp32" if tensor.is_floating_point() else "int32") for tensor in tensors]
    message = Forward(microbatch=name, stage=node.context.stage if stage is None else stage)
    _, [gradient] = await guest.call(
        peer_of(node), Traffic.PIPELINE, message, Gradient, parcel, deadline=30.0
    )
    return gradient


async def a_last_stage_node_of_its_own() -> tuple[SimulatedSwarm, Node, Rpc]:
    """A stage-1 replica that no stage-0 peer feeds, and a guest to do that."""
    swarm: SimulatedSwarm = micro_swarm()
    await swarm.seed_peer.start()
    node = swarm.add(0, stage=1)
    await until(lambda: node.public_state == "serving")
    return swarm, node, await guest_of(swarm)


def test_a_repeated_delivery_gets_the_same_gradient_and_counts_once() -> None:
    async def main() -> None:
        swarm, node, guest = await a_last_stage_node_of_its_own()
        tensors = microbatch(node)
        at_once = await asyncio.gather(*(forward(guest, node, tensors) for _ in range(3)))
        later = await forward(guest, node, tensors)
        assert all(torch.equal(gradient, later) for gradient in at_once)
        assert node.context.counters.received == 1
        await forward(guest, node, tensors, name="another")
        await until(lambda: node.replica.step == 1)
        assert torch.equal(await forward(guest, node, tensors), later)  # also after the step
        assert (node.replica.step, node.context.counters.received) == (1, 2)
        await swarm.leave()

    run_swarm(main())


def test_the_same_id_from_two_peers_is_two_microbatches() -> None:
    async def main() -> None:
        swarm, node, guest = await a_last_stage_node_of_its_own()
        other = await guest_of(swarm, "another guest")
        await asyncio.gather(forward(guest, node, microbatch(node)), forward(other, node, microbatch(node)))
        assert node.context.counters.received == 2
        await swarm.leave()

    run_swarm(main())


def damaged(tensors: list[torch.Tensor], damage: str) -> list[torch.Tensor]:
    activations, labels = (tensor.clone() for tensor in tensors)
    if damage == "nan":
        activations[0, 0, 0] = float("nan")
    if damage == "infinite":
        activations[0, 0, 0] = float("inf")
    if damage == "beyond the vocabulary":
        labels[0, 0] = 256
    if damage == "negative token":
        labels[0, 0] = -100
    return {
        "other hidden size": [activations[..., :-1].contiguous(), labels],
        "other length": [activations[:, :-1].contiguous(), labels[:, :-1].contiguous()],
        "labels of another batch": [activations, labels[:-1]],
        "no sequences": [activations[:0], labels[:0]],
        "no labels": [activations],
        "scalar labels": [activations, torch.tensor(3, dtype=torch.int32)],
        "float labels": [activations, labels.float()],
    }.get(damage, [activations, labels])


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        ("nan", "non-finite"),
        ("infinite", "non-finite"),
        ("beyond the vocabulary", "bad-shape"),
        ("negative token", "bad-shape"),
        ("other hidden size", "bad-shape"),
        ("other length", "bad-shape"),
        ("labels of another batch", "bad-shape"),
        ("no sequences", "bad-shape"),
        ("no labels", "bad-shape"),
        ("scalar labels", "bad-shape"),
        ("float labels", "bad-shape"),
    ],
)
def test_a_malformed_microbatch_is_refused_and_leaves_no_trace(damage: str, code: str) -> None:
    async def main() -> None:
        swarm, node, guest = await a_last_stage_node_of_its_own()
        good = microbatch(node)
        with pytest.raises(Refused) as refusal:
            await forward(guest, node, damaged(good, damage))
        assert refusal.value.code == code
        assert node.context.counters.received == 0
        assert not node.replica.flat.gradients.any()
        for number in range(2):  # and the step has room for exactly its batch still
            await forward(guest, node, good, name=str(number))
        await until(lambda: node.replica.step == 1)
        await swarm.leave()

    run_swarm(main())


def test_nobody_but_stage_0_itself_decides_what_stage_0_trains_on() -> None:
    async def main() -> None:
        swarm = await training(1, inner__total_steps=FOREVER)
        node = swarm.nodes[0]
        guest = await guest_of(swarm)
        tokens = microbatch(node)[1]
        for number in range(20):
            with pytest.raises(Refused):
                await forward(guest, node, [tokens, tokens], name=str(number))
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())


def test_a_microbatch_for_another_stage_is_refused() -> None:
    async def main() -> None:
        swarm, node, guest = await a_last_stage_node_of_its_own()
        with pytest.raises(Refused, match="serves stage 1"):
            await forward(guest, node, microbatch(node), stage=7)
        await swarm.leave()

    run_swarm(main())


# --- peers die ----------------------------------------------------------------------------------


def test_a_node_killed_in_mid_run_costs_resends_and_the_rest_finish() -> None:
    async def main() -> SimulatedSwarm:
        swarm = await training(3, step=8)
        swarm.kill(1)
        await swarm.finish()
        return swarm

    swarm = run_swarm(main())
    assert {event["node"] for event in events_of(swarm, "finished")} == {0, 2, 3, 4, 5}
    assert sum(node.context.counters.resends for node in stage_nodes(swarm, 0)) == len(
        events_of(swarm, "resend")
    )
    assert events_of(swarm, "resend")
    for node in swarm.nodes.values():
        assert_exact_admission(node)


def test_a_dead_stage_pauses_the_one_before_until_a_new_replica_joins() -> None:
    async def main() -> None:
        swarm = await training(2, step=8)
        for number in numbers_of_stage(swarm, 1):
            swarm.kill(number)
        await asyncio.sleep(10)
        paused = [step_of(node) for node in swarm.nodes.values()]
        assert {event["node"] for event in events_of(swarm, "no-peer")} == {0, 2}
        await asyncio.sleep(10)
        assert [step_of(node) for node in swarm.nodes.values()] == paused
        swarm.add(9, stage=1)
        await swarm.finish()
        assert all_reached(stage_nodes(swarm, 0), 30)

    run_swarm(main())


def test_a_partner_killed_between_agreement_and_exchange_leaves_the_other_to_end_its_round() -> None:
    async def main() -> None:
        swarm = await training(2, step=1, outer__inner_steps=20, inner__total_steps=FOREVER)
        first = swarm.nodes[0]
        await until(lambda: first._rounds.has_partner)
        agreed = first._rounds.matchmaker.pair
        assert agreed is not None
        swarm.kill(next(n for n, node in swarm.nodes.items() if peer_of(node) == agreed.partner))
        rounds = len(events_of(swarm, "round", node=0))
        await until(lambda: len(events_of(swarm, "round", node=0)) > rounds)
        assert events_of(swarm, "round", node=0)[-1]["partner"] is None
        assert not events_of(swarm, "exchange-failed", node=0)  # it asked in the middle of the round
        await everyone_goes_on(swarm, 30)
        await swarm.leave()

    run_swarm(main())


def test_a_frozen_peer_only_costs_deadlines() -> None:
    async def main() -> None:
        swarm = await training(3, inner__total_steps=FOREVER)
        frozen = swarm.nodes[1]
        swarm.network.freeze(peer_of(frozen))
        others = [node for node in swarm.nodes.values() if node is not frozen]
        goal = max(step_of(node) for node in others) + 40
        await until(lambda: all_reached(others, goal), seconds=300)
        assert events_of(swarm, "resend")
        swarm.network.thaw(peer_of(frozen))
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())


def test_a_network_daemon_that_restarts_pauses_its_node_and_does_not_end_it() -> None:
    async def main() -> None:
        swarm = await training(2, inner__total_steps=FOREVER)
        transport: Any = swarm.nodes[0].transport
        real = transport.open

        async def down(*_: Any) -> Stream:
            raise TransportDown("p2pd is not running at present")

        transport.open = down
        for stream in list(transport._streams):
            stream.break_off()
        await asyncio.sleep(3)
        transport.open = real
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())


def test_both_sides_of_a_partition_train_and_meet_again() -> None:
    async def main() -> None:
        swarm = await training(4, inner__total_steps=FOREVER)
        sides = [[swarm.nodes[n] for n in range(4)], [swarm.nodes[n] for n in range(4, 8)]]
        swarm.network.partition(*([peer_of(node) for node in side] for side in sides))
        await asyncio.sleep(15)
        await everyone_goes_on(swarm, 20)
        swarm.network.heal()
        for node in swarm.nodes.values():
            node.context.counters.partners.clear()
        here, there = ({peer_of(node) for node in side} for side in sides)
        await until(lambda: any(there & set(node.context.counters.partners) for node in sides[0]), 600)
        await until(lambda: any(here & set(node.context.counters.partners) for node in sides[1]), 600)
        await swarm.leave()

    run_swarm(main())


def test_the_seed_peer_may_die_and_a_plain_member_welcomes_newcomers() -> None:
    async def main() -> None:
        swarm = await training(2, inner__total_steps=FOREVER)
        swarm.network.kill(swarm.seed_peer.transport.peer_id)
        await everyone_goes_on(swarm)
        newcomer = swarm.add(9, stage=1, join=memory_address(peer_of(swarm.nodes[2])))
        await until(lambda: step_of(newcomer) > 0 and newcomer.context.counters.partners != {})
        await swarm.leave()

    run_swarm(main())


# --- joining ------------------------------------------------------------------------------------


def test_a_late_joiner_takes_over_the_state_and_takes_part_in_the_gossip() -> None:
    async def main() -> None:
        swarm = await training(2, step=25, inner__total_steps=FOREVER)
        newcomer = swarm.add(9, stage=0)
        await until(lambda: newcomer.public_state == "serving")
        [downloaded] = events_of(swarm, "downloaded", node=9)
        assert downloaded["step"] >= 25
        assert downloaded["round"] >= 3
        members = [node for node in stage_nodes(swarm, 0) if node is not newcomer]
        start = Replica(swarm.manifest, 0).phi
        moved = (members[0].replica.phi - start).norm()
        assert (newcomer.replica.phi - members[0].replica.phi).norm() < 0.5 * moved
        assert newcomer.replica.second_moment.any()
        await until(lambda: len(newcomer.context.counters.partners) == 2)
        await until(lambda: all(peer_of(newcomer) in n.context.counters.partners for n in members))
        await swarm.leave()

    run_swarm(main())


def test_a_joiner_whose_donors_die_in_the_middle_starts_from_whole_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half a download must not be mixed with the weights that the replica had."""
    for module in ("replica", "state_transfer", "exchange"):
        monkeypatch.setattr(f"node.{module}.PIECE_PARAMETERS", 512)
    slow = Link(latency=0.01, bandwidth=20_000.0)

    async def main() -> None:
        swarm = await training(1, step=6, link=slow, inner__total_steps=FOREVER)
        newcomer = swarm.add(9, stage=1)
        await until(lambda: hasattr(newcomer, "replica"))
        start = newcomer.replica.phi.clone()
        await asyncio.sleep(1.0)
        swarm.kill(1)
        await until(lambda: newcomer.public_state == "serving", seconds=600)
        assert events_of(swarm, "download-failed", node=9)
        assert torch.equal(newcomer.replica.phi, start)
        await swarm.leave()

    run_swarm(main())


def test_newcomers_that_start_together_spread_over_the_stages() -> None:
    async def main() -> None:
        swarm: SimulatedSwarm = micro_swarm()
        await swarm.seed_peer.start()
        for number in range(4):
            swarm.add(number)
        await swarm.finish()
        stages = Counter(node.context.stage for node in swarm.nodes.values())
        assert stages == {0: 2, 1: 2}

    run_swarm(main())


def test_a_newcomer_takes_the_stage_that_needs_replicas_most() -> None:
    async def main() -> None:
        swarm = await training(2, inner__total_steps=FOREVER)
        swarm.kill(1)
        await asyncio.sleep(10)
        newcomer = swarm.add(9)
        await until(lambda: newcomer.public_state == "serving")
        assert newcomer.context.stage == 1
        await swarm.leave()

    run_swarm(main())


async def fails_to_join(swarm: SimulatedSwarm, number: int) -> Exception:
    task = swarm.tasks.pop(number)
    await asyncio.wait([task])
    del swarm.nodes[number]
    error = task.exception()
    assert isinstance(error, Exception)
    return error


@pytest.mark.parametrize(("seconds", "words"), [(3.5, "3.5 s ahead"), (-60.0, "60.0 s behind")])
def test_a_wrong_clock_is_told_with_its_error_and_what_to_do(seconds: float, words: str) -> None:
    async def main() -> None:
        swarm = await training(1)
        node = swarm.add(9, stage=1)
        swarm.network.skew(peer_of(node), seconds)
        error = await fails_to_join(swarm, 9)
        assert isinstance(error, ClockError)
        assert words in str(error)
        assert "timedatectl" in str(error)
        await swarm.leave()

    run_swarm(main())


def test_a_clock_within_the_limit_is_no_hindrance() -> None:
    async def main() -> None:
        swarm = await training(1, inner__total_steps=FOREVER)
        newcomer = swarm.add(9, stage=1)
        swarm.network.skew(peer_of(newcomer), 2.5)
        await until(lambda: newcomer.replica.step > 0 if hasattr(newcomer, "replica") else False)
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())


def test_a_stage_that_does_not_exist_is_refused_with_those_that_do() -> None:
    async def main() -> None:
        swarm = await training(1)
        swarm.add(9, stage=2)
        error = await fails_to_join(swarm, 9)
        assert isinstance(error, JoinError)
        assert "stages 0 to 1" in str(error)
        await swarm.leave()

    run_swarm(main())


def test_nobody_at_the_address_is_told_with_the_address() -> None:
    async def main() -> None:
        swarm = await training(1)
        nowhere = memory_address(Identity.from_seed("nobody").peer_id)
        swarm.add(9, stage=1, join=nowhere)
        error = await fails_to_join(swarm, 9)
        assert isinstance(error, JoinError)
        assert nowhere in str(error)
        await swarm.leave()

    run_swarm(main())


def test_a_peer_of_another_run_is_not_joined() -> None:
    async def main() -> None:
        swarm = await training(1)
        swarm.add(9, stage=1, run="0123456789abcdef")
        error = await fails_to_join(swarm, 9)
        assert isinstance(error, JoinError)
        assert "0123456789abcdef" in str(error)
        await swarm.leave()

    run_swarm(main())


# --- leaving and coming back --------------------------------------------------------------------


def test_a_node_that_leaves_finishes_its_work_withdraws_its_record_and_is_not_missed() -> None:
    async def main() -> None:
        swarm = await training(3, inner__total_steps=FOREVER)
        leaving = swarm.nodes[1]
        leaving.stop()
        await asyncio.wait([swarm.tasks[1]])
        [left] = events_of(swarm, "left", node=1)
        assert left["step"] == leaving.replica.step
        guest = await guest_of(swarm)
        await guest.transport.connect([memory_address(peer_of(swarm.nodes[0]))], 5.0)
        records = await guest.transport.get(stage_key(swarm.nodes[0].context.run_id, 1), 5.0)
        states = {peer: announcement.state for peer, announcement in map(parse_announcement, records)}
        assert states[peer_of(leaving)] == "leaving"
        resends = len(events_of(swarm, "resend"))
        await asyncio.sleep(2)
        del swarm.nodes[1]
        await everyone_goes_on(swarm, 20)
        assert len(events_of(swarm, "resend")) <= resends + 3  # those who had not read the record yet
        await swarm.leave()

    run_swarm(main())


def test_leaving_does_not_wait_for_a_stage_that_is_gone() -> None:
    async def main() -> None:
        swarm = await training(1, inner__total_steps=FOREVER)
        swarm.kill(1)
        await asyncio.sleep(5)
        swarm.nodes[0].stop()
        await asyncio.wait_for(asyncio.shield(swarm.tasks[0]), 60)
        await swarm.leave()

    run_swarm(main())


def test_a_swarm_that_was_down_comes_back_from_its_directories_where_it_was(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await training(
            2, step=1, directory=tmp_path, inner__total_steps=FOREVER, outer__inner_steps=10
        )
        await asyncio.sleep(5)
        for node in swarm.nodes.values():
            await node.checkpoints.save()
        before = {n: (peer_of(node), step_of(node)) for n, node in swarm.nodes.items()}
        await asyncio.sleep(2)
        for number in list(swarm.nodes):
            swarm.kill(number)
        await asyncio.sleep(30)
        for number in before:
            swarm.add(number)
        await until(lambda: all(node.public_state == "serving" for node in swarm.nodes.values()))
        for number, (peer, step) in before.items():
            [restored] = events_of(swarm, "restored", node=number)
            assert peer_of(swarm.nodes[number]) == peer
            assert step - 2 <= restored["step"] <= step
        await everyone_goes_on(swarm)
        assert not events_of(swarm, "downloaded")
        await swarm.leave()

    run_swarm(main())


def test_a_swarm_comes_back_with_nobody_but_its_members(tmp_path: Path) -> None:
    """The seed peer is dead and every member was down: the first one starts alone, the others find it."""

    async def main() -> None:
        swarm = await training(1, directory=tmp_path, inner__total_steps=FOREVER)
        await asyncio.sleep(5)
        for node in swarm.nodes.values():
            await node.checkpoints.save()
        swarm.network.kill(swarm.seed_peer.transport.peer_id)
        for number in (0, 1):
            swarm.kill(number)
        await asyncio.sleep(60)
        swarm.add(0)
        await asyncio.sleep(30)
        assert events_of(swarm, "nobody-reached", node=0)
        swarm.add(1)
        await until(
            lambda: len(swarm.nodes) == 2 and all(hasattr(n, "replica") for n in swarm.nodes.values())
        )
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())


def test_a_node_killed_and_started_again_catches_up(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await training(2, directory=tmp_path, inner__total_steps=FOREVER)
        await swarm.nodes[1].checkpoints.save()
        swarm.kill(1)
        others = stage_nodes(swarm, 1)
        rounds = others[0].replica.round
        await until(lambda: others[0].replica.round >= rounds + 8, seconds=300)
        returned = swarm.add(1)
        await until(lambda: returned.public_state == "serving")
        assert events_of(swarm, "checkpoint-old", node=1)
        assert returned.replica.round >= rounds + 8
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())


def test_a_directory_of_another_run_is_not_used(tmp_path: Path) -> None:
    async def founded(seed: int) -> SimulatedSwarm:
        return await training(1, step=1, seed=seed, directory=tmp_path, inner__total_steps=FOREVER)

    async def main() -> None:
        swarm = await founded(1)
        await swarm.leave()
        other: SimulatedSwarm = micro_swarm(seed=2, directory=tmp_path)
        await other.seed_peer.start()
        other.add(0, stage=0)
        error = await fails_to_join(other, 0)
        assert isinstance(error, JoinError | StateError)
        assert "--state-dir" in str(error)
        await other.leave()

    run_swarm(main())


def test_a_finished_node_leaves_the_others_alone() -> None:
    """It stays to serve the model, but proposes to nobody and takes no microbatch that it would not finish."""

    async def main() -> None:
        swarm = micro_swarm(stages=1, inner__total_steps=40)
        await swarm.seed_peer.start()
        swarm.add(0, stage=0, speed=4.0)
        swarm.add(1, stage=0, speed=0.5)
        swarm.add(2, stage=0, speed=0.5)
        await until(lambda: swarm.nodes[0].public_state == "finished")
        fast = swarm.nodes[0]
        await asyncio.sleep(2)
        asked: list[Any] = []
        real = fast.rpc.call

        async def call(*args: Any, **named: Any) -> Any:
            asked.append(args)
            return await real(*args, **named)

        fast.rpc.call = call  # type: ignore[method-assign]
        await swarm.finish()
        assert not asked

    run_swarm(main())


def test_people_can_ask_a_node_how_it_is() -> None:
    async def main() -> None:
        swarm = await training(3, step=20, inner__total_steps=FOREVER)
        guest = await guest_of(swarm)
        node = swarm.nodes[1]
        stats, _ = await guest.call(peer_of(node), Traffic.CONTROL, GetStats(), NodeStats, deadline=5.0)
        manifest = micro_manifest()
        assert (stats.stage, stats.state) == (1, "serving")
        assert 20 <= stats.step <= node.replica.step
        assert stats.tokens == stats.received * manifest.tokens_per_microbatch
        assert stats.pair_averagings == sum(stats.partners.values()) > 0
        assert stats.tokens_per_second > 0
        assert stats.loss is not None
        await swarm.leave()

    run_swarm(main())


def test_errors_of_a_run_are_ours() -> None:
    """What `SimulatedSwarm.finish` raises is what a volunteer would read."""

    async def main() -> None:
        swarm: SimulatedSwarm = micro_swarm()
        await swarm.seed_peer.start()
        swarm.add(0, stage=9)
        with pytest.raises(NolocoError, match="does not exist"):
            await swarm.finish()

    run_swarm(main())
