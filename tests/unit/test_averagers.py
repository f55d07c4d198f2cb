"""The ways of averaging, one for each `outer.method`, and the rounds of a replica that averages with nobody."""

from __future__ import annotations

import pytest

from bootstrap.lab.in_memory.memory_network import MemoryNetwork
from node.model.fragment import Fragment
from node.model.replica import Replica
from node.rounds.all_reduce import AllReduce
from node.rounds.averager import Alone, Averager
from node.rounds.gossip import PairAverager
from protocol.errors import OutOfMemory
from tests.swarm.micro import run_swarm
from tests.unit.two_ends import NEAR, End, alone, assert_alone


def end_with(method: str) -> End:
    return End(MemoryNetwork(1, NEAR), "a", Replica, outer__method=method)


@pytest.mark.parametrize(
    ("method", "kind", "waits"),
    [
        ("noloco", PairAverager, False),  # nobody is agreed on yet
        ("average", PairAverager, False),
        ("diloco", AllReduce, True),
        ("local", Alone, False),
    ],
)
def test_each_method_has_its_way_of_averaging(method: str, kind: type[Averager], waits: bool) -> None:
    async def main() -> None:
        end = end_with(method)
        assert type(end.rounds.averager) is kind
        assert end.rounds.will_wait is waits
        assert end.rounds.averager.pair is None
        await end.rounds.close()

    run_swarm(main())


@pytest.mark.parametrize("method", ["diloco", "local"])
def test_without_pairs_rounds_have_k_inner_steps_and_nobody_is_sought(method: str) -> None:
    async def main() -> None:
        end = end_with(method)
        rounds, k = end.rounds, end.context.manifest.outer.inner_steps
        for steps in range(1, k + 1):
            assert not rounds.must_end
            end.train(steps)
            rounds.step_done(1.0)
        assert rounds.must_end
        assert not await rounds.seek_last()
        assert (rounds.may_meet_others, rounds.partner_trains, rounds.behind) == (False, False, "")

    run_swarm(main())


def test_a_replica_alone_takes_its_own_step_and_says_so() -> None:
    async def main() -> None:
        end = end_with("local")
        assert repr(end.rounds) == "<Rounds by <Alone, round 0: 0 of 5 inner steps done>>"
        end.train(1)
        assert repr(end.rounds.averager) == "<Alone, round 0: 1 of 5 inner steps done>"
        expected = alone(end.replica)
        await end.rounds.finish()
        assert_alone(end, expected)
        (told,) = end.events
        assert (told["event"], told["round"], told["partner"], told["gossip_bytes"]) == ("round", 1, None, 0)

    run_swarm(main())


@pytest.mark.parametrize("method", ["noloco", "local"])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_step_that_memory_runs_out_in_is_taken_once(method: str, is_late: bool) -> None:
    async def main() -> None:
        end = end_with(method)
        finish, tries = end.replica.finish_round_alone, 0

        def short(own: Fragment) -> None:
            nonlocal tries
            tries += 1
            if tries > 1 or is_late:
                finish(own)
            if tries == 1:
                raise OutOfMemory("none")

        end.replica.finish_round_alone = short  # type: ignore[method-assign]
        end.train(1)
        expected = alone(end.replica)
        await end.rounds.finish()
        assert_alone(end, expected)
        assert end.replica.round == 1
        assert [event["event"] for event in end.events] == ["round-alone"] * (not is_late) + ["round"]
        await end.rounds.close()

    run_swarm(main())
