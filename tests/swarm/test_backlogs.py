"""Senders ask two replicas what they have to do: the one with less gets the microbatch, whatever else they say."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.model.compute import Priority
from node.process.daemon import Node
from protocol.errors import Refused
from protocol.messages.training import Backlog, GetBacklog
from protocol.rpc.rpc import Answer, Request
from tests.swarm.micro import (
    FOREVER,
    WIDE,
    everyone_reaches,
    micro_corpus,
    micro_manifest,
    peer_of,
    run_swarm,
    stage_nodes,
)
from tests.swarm.test_routing_liars import everyone_goes_on_but, sent_to

SECONDS = 120.0
REPLICAS = 4
MOST_LEFT = 0.1  # of the microbatches, instead of a quarter: where the others had two fair shares already
Handler = Callable[[Request[GetBacklog]], Awaitable[Answer[Backlog]]]


def says(node: Node, handler: Handler) -> None:
    node.context.rpc.handle(GetBacklog.answered_by(handler))


async def always(seconds: float) -> Answer[Backlog]:
    return Answer(Backlog(seconds=seconds))


async def silence(request: Request[GetBacklog]) -> Answer[Backlog]:
    await asyncio.sleep(1e6)
    raise AssertionError


async def refusal(request: Request[GetBacklog]) -> Answer[Backlog]:
    raise Refused("unknown-request", "as from an older version")


def work_seconds(stage: int, priority: Priority) -> float:
    return 0.005 if priority in (Priority.OPTIMIZER, Priority.SERVE) else 0.5


async def share_of_one(handler: Handler) -> float:
    """Of the microbatches that go to one of four replicas, which answers the question so."""
    manifest = micro_manifest(inner__total_steps=FOREVER)
    swarm = SimulatedSwarm(manifest, micro_corpus(), 2, WIDE, seconds=work_seconds)
    await swarm.start(REPLICAS)
    await everyone_reaches(swarm, 3)
    odd, *_ = stage_nodes(swarm, 1)
    says(odd, handler)
    before = sent_to(swarm, peer_of(odd))
    await asyncio.sleep(SECONDS)
    after = sent_to(swarm, peer_of(odd))
    assert not [event for event in swarm.events if event["event"] in ("resend", "banned")]
    await everyone_goes_on_but(swarm, odd)
    await swarm.leave()
    return (after[0] - before[0]) / (after[1] - before[1])


@pytest.mark.long
def test_one_with_much_to_do_is_passed_by() -> None:
    assert run_swarm(share_of_one(lambda request: always(1e6))) < MOST_LEFT


@pytest.mark.long
def test_one_that_always_says_that_it_has_nothing_to_do_gets_at_most_twice_a_fair_share() -> None:
    assert 1 / REPLICAS < run_swarm(share_of_one(lambda request: always(0.0))) <= 2 / REPLICAS * 1.05


@pytest.mark.long
def test_one_that_does_not_answer_loses_the_choice_and_nothing_else() -> None:
    assert run_swarm(share_of_one(silence)) < MOST_LEFT


@pytest.mark.long
def test_one_of_an_older_version_loses_the_choice_and_nothing_else() -> None:
    assert run_swarm(share_of_one(refusal)) < MOST_LEFT
