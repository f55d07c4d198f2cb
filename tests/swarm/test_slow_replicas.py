"""Being slow is not being stale: a slow replica ends its own rounds, meets others in them, and is never sent back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.model.compute import Priority
from node.rounds.pace import steps_of_round
from protocol.ground import PeerId
from tests.swarm.micro import WIDE, events_of, micro_corpus, micro_manifest, run_swarm, until

K = 12
STEP_SECONDS = 0.25  # at speed 1: one microbatch and the step
SECONDS = 300.0
LIGHT = {"inner__microbatches": 1, "inner__sequences": 1, "data__sequence_tokens": 16}


@dataclass
class Seen:
    """One replica in `SECONDS` of training."""

    speed: float
    steps: int
    downloads: int
    partners: list[PeerId | None]  # of its rounds


def work_seconds(stage: int, priority: Priority) -> float:
    return 0.005 if priority in (Priority.OPTIMIZER, Priority.SERVE) else STEP_SECONDS - 0.005


async def watched(speeds: list[float], **settings: object) -> list[Seen]:
    """Train one stage of replicas with these speeds; the peers of its partners are their numbers."""
    manifest = micro_manifest(stages=1, inner__total_steps=10_000, outer__inner_steps=K, **LIGHT, **settings)
    swarm = SimulatedSwarm(manifest, micro_corpus(), 2, WIDE, seconds=work_seconds)
    await swarm.seed_peer.start()
    for number, speed in enumerate(speeds):
        swarm.add(number, stage=0, speed=speed)
    await until(lambda: all(node.public_state == "serving" for node in swarm.nodes.values()))
    began = len(swarm.events)
    await asyncio.sleep(SECONDS)
    del swarm.events[:began]
    seen = [
        Seen(
            speed,
            len(events_of(swarm, "step", number)),
            len(events_of(swarm, "downloaded", number)),
            [round_["partner"] for round_ in events_of(swarm, "round", number)],
        )
        for number, speed in enumerate(speeds)
    ]
    await swarm.leave()
    return seen


@pytest.fixture
def many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("model.fragment", "state.transfer", "rounds.exchanges"):
        monkeypatch.setattr(f"node.{module}.PIECE_PARAMETERS", 1_024)


CASES = [
    (slower, pace, pieces)
    for slower in (3, 5, 10)
    for pace in ("steps", "time")
    for pieces in ("one", "many")
]


@pytest.mark.timeout(600)
@pytest.mark.long
@pytest.mark.parametrize(("slower", "pace", "pieces"), CASES)
def test_slow_replicas_end_the_rounds_that_their_speed_allows(
    slower: int, pace: str, pieces: str, request: pytest.FixtureRequest
) -> None:
    if pieces == "many":
        request.getfixturevalue("many_pieces")
    speeds = [1.0, *[1 / slower] * 3]
    everyone = run_swarm(watched(speeds, outer__pace=pace))
    possible = sum(speeds) * SECONDS / STEP_SECONDS
    assert sum(seen.steps for seen in everyone) >= 0.95 * possible
    _, *slow = everyone
    own = steps_of_round("time" if pace == "time" else "steps", K, 1 / slower, [1.0, *[1 / slower] * 2])
    allowed = SECONDS / STEP_SECONDS / slower / own
    for seen in slow:
        assert len(seen.partners) >= 0.8 * allowed
        assert seen.downloads <= 1
        assert sum(partner is not None for partner in seen.partners) >= 0.8 * len(seen.partners)
    met_fast = sum(partner is not None for partner in everyone[0].partners)
    met_slow = sum(partner is not None for seen in slow for partner in seen.partners) - met_fast
    rounds = sum(len(seen.partners) for seen in slow)
    kept = sum(seen.steps for seen in everyone) / possible
    print(
        f"{slower}x slower, pace {pace}, {pieces}: of the slow ones' rounds {met_fast / rounds:.2f} with the fast"
    )
    print(f"one, {met_slow / rounds:.2f} with one another; {kept:.3f} of all speed")
    assert met_fast >= 0.15 * rounds
    assert met_slow >= 0.15 * rounds
