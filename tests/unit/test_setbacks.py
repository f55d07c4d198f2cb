"""Stages that lost their state or wait for it: begun anew, waiting, the step fell back; each with its time."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest

from bootstrap.dashboard.wording import Voice
from bootstrap.inspect.observer import Sighting
from bootstrap.inspect.remembering import LEAST_FALL, Memory
from bootstrap.inspect.seen import Finding, Seen, Severity
from bootstrap.inspect.setbacks import NEWS_SECONDS
from bootstrap.inspect.verdict import in_a_word, verdict
from node.watch.words import ago, clock_time, waiting_sentence
from protocol.errors import WireError
from protocol.messages.peers import Awaited, LossBest, NodeStats
from protocol.records.identity import Identity
from tests.unit.test_verdict import node, pairs

NOON = 1_800_014_400.0  # 15 January 2027, 12:00 in UTC
PEER = Identity.from_seed("awaited").peer_id
AWAITED = Awaited(0, 486, PEER, NOON - 180.0, NOON + 1_860.0)
WAITS = (
    f"Stage 0 was at step 486; …{PEER[-8:]} had it 3 min ago. Waiting for it until 12:31; begin anew with "
    "--begin-anew."
)


@pytest.fixture(autouse=True)
def greenwich(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC0")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def found_in(sightings: list[Sighting], now: float = NOON) -> dict[str, Finding]:
    return {finding.kind: finding for finding in verdict(Seen(2, sightings, version="0.1.0", now=now))}


# --- times --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "told"),
    [
        (NOON + 1_860, "12:31"),
        (NOON - 86_400, "14 Jan 12:00"),
        (NOON - 3 * 365 * 86_400, "2024 12:00"),
        (-1e15, "1970 00:00"),
        (1e15, "9987"),
    ],
)
def test_a_time_has_its_date_where_that_is_not_today_s_and_none_is_too_large(
    moment: float, told: str
) -> None:
    assert told in clock_time(moment, NOON)
    assert len(clock_time(moment, NOON)) <= len("14 Jan 2024 12:00")


@pytest.mark.parametrize(("seconds", "told"), [(180, "3 min ago"), (9e3, "2.5 h ago"), (-5, "just now")])
def test_how_long_ago(seconds: float, told: str) -> None:
    assert ago(seconds) == told


# --- begun anew ---------------------------------------------------------------------------------


def test_a_stage_that_was_begun_anew_is_a_warning_for_an_hour_and_then_a_fact() -> None:
    swarm = [*(node(0, n, beginning=1, begun=NOON - 300, time=NOON) for n in range(2)), node(1), node(1, 1)]
    found = found_in(swarm)["begun-anew"]
    assert found == Finding(
        Severity.WARNING,
        "begun-anew",
        "stage 0 was begun anew at 11:55: it learns from the start again",
        0,
        NOON - 300,
    )
    later = [node(0, n, beginning=3, begun=NOON - 300, time=NOON + NEWS_SECONDS) for n in range(2)]
    found = found_in([*later, node(1), node(1, 1)], NOON + NEWS_SECONDS)["begun-anew"]
    assert found.severity is Severity.FINE
    assert "at 11:55, 3 times by now:" in found.sentence


def test_a_node_of_an_earlier_version_tells_of_no_beginning_and_one_that_lies_is_not_believed() -> None:
    old = NodeStats.parsed({"stage": 0, "state": "serving", "step": 7, "round": 1})
    assert (old.beginning, old.begun, old.best, old.awaited) == (0, None, None, None)
    assert "begun-anew" not in found_in([*pairs(2), node(0, 5, beginning=2**62, begun=-1e15)])


def test_the_log_does_not_say_that_it_is_over_when_it_is_old_news(caplog: pytest.LogCaptureFixture) -> None:
    voice = Voice()
    with caplog.at_level(logging.INFO, "noloco"):
        for severity in (Severity.WARNING, Severity.FINE):
            voice.note([Finding(severity, "begun-anew", "stage 0 was begun anew", 0)])
    assert caplog.messages == ["stage 0 was begun anew."]


# --- waiting ------------------------------------------------------------------------------------


def test_what_a_first_replica_waits_for_is_one_sentence() -> None:
    assert waiting_sentence(AWAITED, NOON) == WAITS
    assert "; a peer had it 3 min ago" in waiting_sentence(AWAITED._replace(peer=""), NOON)


def test_a_node_that_waits_is_found_while_it_joins_by_its_own_clock() -> None:
    """A clock that is wrong by an hour does not change how long ago the peer was there."""
    swarm = [node(0, state="joining", awaited=AWAITED, time=NOON), *pairs(2)[2:]]
    found = found_in(swarm, now=NOON + 3_600)
    assert found["waiting"].sentence == WAITS[:1].lower() + WAITS[1:-1]
    assert (found["waiting"].stage, found["waiting"].time) == (0, AWAITED.until)
    assert found["stage-empty"].sentence.endswith("1 is joining it")
    assert "waiting" not in found_in([*pairs(2), node(0, 5, awaited=AWAITED, time=NOON)])  # it serves


@pytest.mark.parametrize(
    "garbage",
    [
        {"beginning": -1},
        {"begun": float("nan")},
        {"best": [1.0]},
        {"best": ["x", 1.0]},
        {"best": [1.0, 1.0, -1.0]},
        {"awaited": [0, 1, "no peer id", 0.0, 0.0]},
        {"awaited": [0, -1, PEER, 0.0, 0.0]},
        {"awaited": [0, 1, PEER, float("inf"), 0.0]},
    ],
)
def test_garbage_is_malformed(garbage: dict[str, object]) -> None:
    with pytest.raises(WireError):
        NodeStats.parsed({"stage": 0, "state": "joining", "step": 0, "round": 0} | garbage)


def test_the_new_fields_travel() -> None:
    told = NodeStats(
        stage=0, state="joining", step=0, round=0, best=LossBest(3.0, NOON, 0.1), beginning=2, begun=NOON,
        awaited=AWAITED,
    )  # fmt: skip
    assert NodeStats.parsed(told.model_dump()) == told
    assert NodeStats.parsed(told.model_dump() | {"best": [3.0, NOON]}).best == LossBest(3.0, NOON)


# --- the step fell back -------------------------------------------------------------------------


def steps(*of: tuple[int, int], stage: int = 0) -> list[Sighting]:
    """Replicas of a stage, by (number, step)."""
    return [node(stage, number, step=step) for number, step in of]


def looked(*looks: list[Sighting]) -> Seen:
    memory = Memory(2, "0.1.0")
    for number, sightings in enumerate(looks):
        seen = memory.look(sightings, NOON + 60 * number)
    return seen


OTHERS = steps((0, 490), (1, 490), stage=1)


@pytest.mark.parametrize(
    ("looks", "fall"),
    [
        ([steps((0, 486)), [], steps((1, 3))], (486, 3)),  # another node, which begins anew
        ([steps((0, 486)), steps((0, 470))], (486, 470)),  # it came back from its checkpoint
        ([steps((0, 486)), steps((0, 470)), steps((0, 475))], (486, 470)),  # and trains on
        ([steps((0, 486)), steps((0, 470)), steps((0, 487))], None),  # and has made up for it
        (
            [steps((0, 486)), steps((1, 3)), steps((2, 1))],
            (486, 3),
        ),  # few steps are no fall, the old one stands
        ([steps((0, 486), (1, 300)), steps((1, 301))], None),  # the one ahead has left, and the other goes on
        ([steps((0, 486), (1, 300)), steps((1, 290))], (486, 290)),
        ([steps((0, 486)), steps((1, 487 - LEAST_FALL))], None),  # a newcomer with the state from just before
        ([steps((0, 485), (1, 10**12)), steps((0, 486), (1, 7))], None),  # one that lied
    ],
)
def test_a_step_that_fell_back_is_found_with_its_time(
    looks: list[list[Sighting]], fall: tuple[int, int] | None
) -> None:
    seen = looked(*(look + OTHERS for look in looks))
    assert {stage: fell[:2] for stage, fell in seen.fell.items()} == ({} if fall is None else {0: fall})
    found = [finding for finding in verdict(seen) if finding.kind == "step-fell-back"]
    assert len(found) == len(seen.fell)
    if fall is not None:
        at = clock_time(seen.fell[0].time, seen.now)
        assert found[0].sentence == f"stage 0: its step fell back from {fall[0]} to {fall[1]} at {at}"
        assert found[0].severity is Severity.WARNING


@pytest.mark.parametrize(("step", "is_found"), [(3, True), (100, False), (486, False)])
def test_a_first_look_compares_stages_with_each_other(step: int, is_found: bool) -> None:
    found = found_in([*steps((0, step), (1, step)), *OTHERS])
    assert ("step-fell-back" in found) is is_found
    if is_found:
        assert found["step-fell-back"].sentence == (
            "stage 0 is at step 3 beside stage 1 at 490: it fell back, or was begun anew"
        )
    assert in_a_word(found.values()) == ("degraded" if is_found else "healthy")


def test_a_stage_that_is_known_to_have_been_begun_anew_is_not_said_to_be_behind_too() -> None:
    found = found_in([*(node(0, n, step=3, beginning=1) for n in range(2)), *OTHERS])
    assert "begun-anew" in found
    assert "step-fell-back" not in found


def test_a_run_that_has_just_begun_has_no_stage_behind() -> None:
    assert "step-fell-back" not in found_in([*steps((0, 0), (1, 0)), *steps((0, 90), (1, 90), stage=1)])


def test_where_all_of_the_first_stage_have_left_a_complete_run_stays_complete() -> None:
    assert Seen(2, [node(1, n, state="finished") for n in range(2)]).is_over
    assert not Seen(2, [node(1, state="finished"), node(1, 1)]).is_over
    assert not Seen(2, [node(0, state="joining"), node(1, state="finished")]).is_over
    assert not Seen(2, []).is_over
