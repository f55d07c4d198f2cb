"""Answers and losses from a finished swarm, without an export."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bootstrap.evaluation.measuring import (
    GIVEN_UP_AFTER,
    SECOND_AFTER,
    MeasuredText,
    WantedLosses,
    evaluate_any,
    evaluate_each,
    evaluate_route,
    evaluate_swarm,
)
from bootstrap.export.tokenizer import tokenizer_of_run
from bootstrap.generation.decoding import Decoding
from bootstrap.generation.swarm_answer import FIRST_PATIENCE, SwarmAnswer
from bootstrap.generation.writing import first_tokens
from bootstrap.inspect.observer import Observer
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.pipeline.inference import Inference
from node.process.daemon import Node
from protocol.codecs.codec import encode
from protocol.errors import DeadlineExceeded, JoinError, Refused
from protocol.ground import PeerId
from protocol.messages.training import Evaluate, Evaluated, Predict, Predicted
from protocol.rpc.rpc import Answer, Request, Rpc
from tests.swarm.micro import observer_of, peer_of, stage_nodes
from tests.swarm.models_out import (
    GREEDY,
    MODELS,
    PROMPT,
    SAMPLED,
    said_by_swarm,
    visiting,
)


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


@pytest.fixture
def keepers(monkeypatch: pytest.MonkeyPatch) -> set[PeerId]:
    """The replicas that keep whatever they are to predict or evaluate, and report that they live."""
    keeping = set[PeerId]()
    for name in ("on_predict", "on_evaluate"):
        honest = getattr(Inference, name)

        async def answer(self: Inference, request: Request[Any], honest: Any = honest) -> Any:
            if self._context.me in keeping:
                await asyncio.sleep(1e6)
            return await honest(self, request)

        monkeypatch.setattr(Inference, name, answer)
    return keeping


@pytest.mark.parametrize("begins", [True, False], ids=["from the start", "later"])
def test_a_replica_that_keeps_requests_holds_no_answer_up(begins: bool, keepers: set[PeerId]) -> None:
    """Failed before: each token had an hour, and every visitor took the replicas of the lowest ids."""

    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        clock, told = asyncio.get_running_loop().time, list[str]()
        route, *others = await observer.routes()
        answer, tokens = SwarmAnswer(observer, route, told.append, others), list[int]()
        if begins:
            keepers.add(route[1])
        began = clock()
        async for token in answer.tokens([7], GREEDY, None):
            tokens.append(token)
            if len(tokens) == 3:
                keepers.add(route[1])
        assert clock() - began < FIRST_PATIENCE + 10.0
        assert len(tokens) == GREEDY.most_tokens
        assert len(told) == 1
        assert "takes too long" in told[0]

    visiting(2, look, inner__total_steps=6)


def test_a_replica_that_keeps_requests_holds_no_evaluation_up(keepers: set[PeerId]) -> None:
    """Failed before, as generating did."""

    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        clock = asyncio.get_running_loop().time
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        text = MeasuredText([(tokens, tokens)] * 3, 96)
        routes = await observer.routes()
        usual = await evaluate_route(observer, text, routes[1])
        keepers.add(routes[0][1])
        began = clock()
        route, loss = await evaluate_any(observer, text, routes, lambda done, total: None)
        assert route == routes[1]
        assert loss.nats == pytest.approx(usual.nats)
        assert clock() - began < SECOND_AFTER + 10.0

    visiting(2, look, inner__total_steps=6)


@pytest.mark.parametrize("told", [(0.0, 2**31), (0.0, 1), (1e9, 32)], ids=["many", "few", "a loss too large"])
def test_a_loss_that_is_not_of_the_tokens_sent_counts_for_nothing(
    told: tuple[float, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failed before: one such answer weighed more than all others of the text."""
    honest = Inference.on_evaluate
    liars, strikes = set[PeerId](), list[PeerId]()

    async def answer(self: Inference, request: Request[Evaluate]) -> Answer[Evaluated]:
        if self._context.me in liars:
            return Answer(Evaluated(loss_sum=told[0], tokens=told[1]))
        return await honest(self, request)

    monkeypatch.setattr(Inference, "on_evaluate", answer)
    monkeypatch.setattr(Rpc, "strike", lambda self, peer: strikes.append(peer))

    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        text = MeasuredText([(tokens, tokens)] * 3, 96)
        routes = await observer.routes()
        usual = await evaluate_route(observer, text, routes[1])
        liars.add(routes[0][1])
        route, loss = await evaluate_any(observer, text, routes, lambda done, total: None)
        assert route == routes[1]
        assert (loss.nats, loss.tokens) == (pytest.approx(usual.nats), 96)
        assert set(strikes) == liars, "the first stage, which passed the answer on, is not to blame"

    visiting(2, look, inner__total_steps=6)


def test_an_answer_goes_on_through_another_route_at_once_when_its_own_fails() -> None:
    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        route, *others = await observer.routes()
        answer = SwarmAnswer(observer, route, others=others).tokens([7], GREEDY, None)
        await anext(answer)
        swarm.kill(next(number for number, one in swarm.nodes.items() if peer_of(one) == route[1]))
        assert len([token async for token in answer]) == GREEDY.most_tokens - 1

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
        return [f"…{peer_of(one)[-8:]}" for one in swarm.nodes.values()]

    replicas = visiting(3, look, inner__total_steps=2, inner__warmup_steps=1)
    *lines, mean, one_alone = capsys.readouterr().out.splitlines()
    assert sorted(" → ".join(line.split("through ")[1] for line in lines).split(" → ")) == sorted(replicas)
    assert "mean over 3 routes" in mean
    assert one_alone in lines


def test_a_replica_that_keeps_requests_is_passed_over_where_each_is_measured(
    keepers: set[PeerId], capsys: pytest.CaptureFixture[str]
) -> None:
    """Failed before: it was waited for as long as it reported that it lives, an hour for each sequence."""

    async def look(swarm: SimulatedSwarm, observer: Observer) -> list[PeerId]:
        clock = asyncio.get_running_loop().time
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        text = MeasuredText([(tokens, tokens)] * 3, 96)
        routes = await observer.routes()
        keepers.add(routes[0][1])
        began = clock()
        await evaluate_each(observer, text, routes)
        assert clock() - began < GIVEN_UP_AFTER + 10.0
        keepers.add(routes[1][1])
        with pytest.raises(DeadlineExceeded, match="evaluated nothing for 120 s"):
            await evaluate_each(observer, text, routes)
        return routes[0]

    silent = visiting(2, look, inner__total_steps=6)
    told = capsys.readouterr()
    assert len(told.out.splitlines()) == 1
    assert f"Passed over {' → '.join(f'…{peer[-8:]}' for peer in silent)}: it evaluated nothing" in told.err


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


def test_a_stage_that_tells_the_rounds_of_a_thousand_fails_its_route_in_words() -> None:
    """Failed before: the stage before could not pass it on, and wrote a failure of ours into its log each time."""

    async def lie(request: Request[Predict]) -> Answer[Predicted]:
        logits = [encode(torch.zeros(1), "fp32"), encode(torch.zeros(1, dtype=torch.int32), "int32")]
        return Answer(Predicted(rounds=[0] * 1_024), logits)

    async def look(swarm: SimulatedSwarm, observer: Observer) -> None:
        for node in stage_nodes(swarm, 1):
            node.context.rpc.handle(Predict.answered_by(lie))
        with pytest.raises(JoinError, match="stage 1 tells the rounds of other stages"):
            await said_by_swarm(observer, GREEDY)

    visiting(1, look, inner__total_steps=6)
