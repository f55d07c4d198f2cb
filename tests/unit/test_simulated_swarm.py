"""`noloco simulate swarm`: one seed gives one log, bounds catch planted bugs, and what it says is sane."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bootstrap.lab.simulated_swarm import modelled_rounds
from bootstrap.lab.simulated_swarm.modelled_dht import ANNOUNCEMENT_BYTES, MOST_RECORDS, look_bytes
from bootstrap.lab.simulated_swarm.swarm_checks import SwarmCheck, broken, checks_of
from bootstrap.lab.simulated_swarm.swarm_measures import SwarmMeasures
from bootstrap.lab.simulated_swarm.swarm_outcome import SwarmOutcome
from bootstrap.lab.simulated_swarm.swarm_page import write_page
from bootstrap.lab.simulated_swarm.swarm_scenario import SWARM_PRESETS, read_scenario, swarm_scenario
from bootstrap.lab.simulated_swarm.swarm_world import SwarmWorld, simulate_swarm
from bootstrap.tools_cli import app
from node.membership.buckets import SAMPLE_EVERY
from node.membership.view import Member, View
from node.pipeline.routing import Router
from node.rounds.meeting import Proposal, RoundProgress
from node.rounds.pairing import Pairing
from node.rounds.search_events import Asker
from protocol.errors import ScenarioError
from protocol.ground import PeerId
from protocol.records.announcement import Announcement
from protocol.transport.base import COPIES

ASKED = "proposals to one replica, deviations above the mean"


def small(peers: dict[str, Any] | None = None, **run: Any) -> Any:
    """Twenty peers of two stages, quick ones, for a few minutes."""
    settings = {
        "minutes": 8.0,
        "warm_up": 2.0,
        "inner_steps": 16,
        "state_bytes": 1_000_000,
        "microbatches": 4,
        **run,
    }
    kind = {"name": "fast", "count": 20, "speed": 4.0, "uplink": 1_000.0, **(peers or {})}
    return swarm_scenario({"name": "small", "run": settings, "peers": [kind]}, "small")


def simulated(scenario: Any) -> tuple[SwarmWorld, Any, list[SwarmCheck]]:
    world = simulate_swarm(scenario, keeps_events=True)
    outcome = SwarmOutcome.of(world)
    return world, outcome, checks_of(world, outcome)


def names(checks: Sequence[SwarmCheck]) -> list[str]:
    return [check.name for check in checks]


def test_the_same_seed_gives_the_same_log_and_another_one_another() -> None:
    scenario = small({"preempted": 0.1}, minutes=3.0, warm_up=1.0)
    (one, _, _), (again, _, _) = simulated(scenario), simulated(scenario)
    other, _, _ = simulated(small({"preempted": 0.1}, minutes=3.0, warm_up=1.0, seed=1))
    assert one.measures.events == again.measures.events
    assert len(one.measures.events) > 50
    assert one.measures.digest == again.measures.digest != other.measures.digest


def test_a_small_swarm_does_what_it_should() -> None:
    _, outcome, _ = simulated(small())
    assert 0.6 < outcome.throughput < 1.0
    assert sum(outcome.idle.values()) < 0.4
    assert outcome.resends == 0
    assert outcome.alone < 0.1
    assert 1.0 <= outcome.imbalance < 1.4
    assert 0.4 < outcome.spread < 1.6
    hops = 4.0 * 60  # microbatches of a peer and minute, were it never to wait
    sent = outcome.bytes["activations"] / 500_000
    assert 0.5 * 0.6 * hops < sent < 0.5 * 1.3 * hops  # half of the peers send


def test_newcomers_take_the_places_of_those_that_are_gone() -> None:
    world, outcome, checks = simulated(small({"preempted": 0.1}))
    assert outcome.deaths > 5
    assert 5 < outcome.useful_after < 60
    assert min(world.serving) >= 5
    assert "dead members that views still hold" not in names(broken(checks))


@pytest.mark.long
def test_the_halves_of_a_cut_network_train_and_come_together() -> None:
    scenario = small(minutes=14.0).model_dump()
    scenario["network"]["partitions"] = [{"minute": 4.0, "minutes": 4.0}]
    world, _, checks = simulated(swarm_scenario(scenario, "cut"))
    assert world.network.cut_since is None
    assert "throughput of the rest while cut off" in names(checks)
    assert broken([check for check in checks if "throughput" in check.name]) == []
    assert len(checks) == 4


def share_with_one_network(seed: int) -> tuple[float, float]:
    """Return the shares of rounds that twelve peers of different networks end with one of eight in one, and alone."""
    kinds = [
        {"name": "alone", "count": 12, "speed": 4.0, "uplink": 1_000.0},
        {"name": "rented", "count": 8, "speed": 4.0, "uplink": 1_000.0, "in_network": 100},
    ]
    run = {**small().model_dump()["run"], "stages": 1, "minutes": 6.0, "seed": seed}
    world, _, _ = simulated(swarm_scenario({"name": "rented", "run": run, "peers": kinds}, "rented"))
    rented = {peer.peer for peer in world.peers.values() if peer.kind.name == "rented"}
    events = world.measures.events
    partners = [partner for _, event, peer, partner in events if event == "round" and peer not in rented]
    met = sum(partner in rented for partner in partners)
    return met / len(partners), partners.count("") / len(partners)


def test_replicas_of_one_network_get_a_bounded_share_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides see to it: who asks leaves them out, and who is asked refuses them, as the daemon does."""
    bounded, alone = share_with_one_network(0)
    monkeypatch.setattr(modelled_rounds, "Asker", lambda **facts: Asker())
    unbounded, _ = share_with_one_network(0)
    assert bounded < 0.75 * unbounded
    assert bounded < 1.5 * 2 / 13  # twice the share of one of thirteen networks
    assert alone < 0.1


# --- peers behind NATs --------------------------------------------------------------------------


def behind_nats(punched: float, passed_on: float = 20.0, share: float = 0.8) -> Any:
    """Four of five of 30 peers behind NATs; their activations are large for what others pass on."""
    peers = {"count": 30, "speed": 2.0, "uplink": 100.0, "dials_out": share}
    scenario = small(peers, minutes=6.0).model_dump()
    scenario["network"] |= {"punched": punched, "passed_on": passed_on}
    return swarm_scenario(scenario, "behind NATs")


def test_most_peers_behind_nats_train_nearly_as_fast_as_all_public_ones() -> None:
    _, public, _ = simulated(behind_nats(0.0, share=0.0))
    world, hidden, checks = simulated(behind_nats(0.7))
    assert hidden.throughput >= 0.9 * public.throughput
    assert hidden.bytes["passed on"] > 0
    assert "passed on" not in public.bytes
    assert hidden.connected == 1.0
    assert "replicas of a stage that are connected through pairs" in names(checks)
    peers = list(world.peers.values())
    pairs = [(one, other) for one in peers for other in peers if one.dials_out and other.dials_out]
    through = [world.network.goes_through_others(*pair) for pair in pairs]
    assert sum(through) / len(through) == pytest.approx(0.3, abs=0.1)
    assert all(
        world.network.goes_through_others(one, other) is told
        for (other, one), told in zip(pairs, through, strict=True)
    )


def test_who_passes_on_keeps_to_its_bound() -> None:
    """Where nothing is punched, what is passed on is most of it, and less than the few relays may."""
    narrow, wide = (simulated(behind_nats(0.0, mbit)) for mbit in (2.0, 200.0))
    relays = sum(not peer.dials_out for peer in narrow[0].peers.values())
    passed_on = narrow[1].bytes["passed on"] * len(narrow[0].peers)  # of all, a minute
    assert 0.5 < passed_on / (relays * 2e6 / 8 * 60) <= 1.05
    assert narrow[1].throughput < 0.9 * wide[1].throughput


def test_a_stage_that_falls_in_two_is_seen() -> None:
    measures = SwarmMeasures(0.0)
    measures.counts = True
    for one, other in (("a", "b"), ("b", "c"), ("d", "e")):
        measures.partner_met(one, other, False, 0.1)
    assert measures.connected("abcde") == 0.6
    measures.partner_met("e", "a", False, 0.1)
    assert measures.connected("abcde") == 1.0
    assert measures.connected("") is None


# --- bugs planted by hand -----------------------------------------------------------------------


@pytest.mark.long
def test_a_pairing_that_prefers_the_lowest_id_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def lowest(
        self: Pairing,
        candidates: Sequence[PeerId],
        here: RoundProgress,
        through_others: Collection[PeerId] = (),
    ) -> Proposal | None:
        class Lowest(random.Random):
            def choice(self, seq: Any) -> Any:
                return min(seq)

        rng, self._rng = self._rng, Lowest(1)
        try:
            return propose(self, candidates, here, through_others)
        finally:
            self._rng = rng

    propose = Pairing.propose
    healthy = names(broken(simulated(small())[2]))
    monkeypatch.setattr(Pairing, "propose", lowest)
    planted = names(broken(simulated(small())[2]))
    assert ASKED in planted
    assert ASKED not in healthy


@pytest.mark.long
def test_a_view_that_never_forgets_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: View, found: Any) -> None:
        take(self, [Member(m.peer, m.announcement, m.expires, kept=1e9) for m in found])

    take = View.take
    scenario = small({"preempted": 0.1})
    monkeypatch.setattr(View, "take", keep)
    assert "dead members that views still hold" in names(broken(simulated(scenario)[2]))


@pytest.mark.long
def test_routing_by_the_order_of_names_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(
        self: Router,
        most: int,
        peers: Sequence[PeerId],
        exclude: Collection[PeerId] = (),
        waited: float = 0.0,
    ) -> list[PeerId]:
        return [peer for peer in sorted(peers) if peer not in exclude][:most]

    healthy = names(broken(simulated(small())[2]))
    monkeypatch.setattr(Router, "choose_some", first)
    assert "routing, most over mean" in names(broken(simulated(small())[2]))
    assert "routing, most over mean" not in healthy


# --- the model of the DHT -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "sample", "measured"),  # docs/notebook/scaling.md, measured on real p2pd by benchmarks/discovery.py
    [(100, 0, 171e3), (62.5, 62.5, 69e3), (78.1, 78.1, 88e3), (78.1, 78.1, 90e3)],
)  # fmt: skip
def test_a_look_costs_what_it_does_on_real_p2pd(records: float, sample: float, measured: float) -> None:
    of_the_sample = look_bytes(round(sample)) / SAMPLE_EVERY if sample else 0.0
    nbytes = look_bytes(round(records), 1 if sample else COPIES) + of_the_sample
    assert nbytes == pytest.approx(measured, rel=0.08)
    assert pytest.approx(9_500, rel=0.08) == ANNOUNCEMENT_BYTES


def test_a_full_key_takes_nobody_more_until_records_end() -> None:
    world = SwarmWorld(small({"count": 2}))
    world.run()
    peer = next(iter(world.alive.values()))
    world.dht._loss = 0.0
    said = Announcement(stage=0, state="serving", since=0.0)
    now = world.now
    for number in range(MOST_RECORDS):
        assert world.dht.put(peer, "key", Member(PeerId(f"{number}"), said, now + 10))
    assert not world.dht.put(peer, "key", Member(PeerId("late"), said, now + 100))
    world.queue.run_until(now + 20)
    assert world.dht.put(peer, "key", Member(PeerId("late"), said, now + 100))
    assert [member.peer for member in world.dht.get(peer, "key")] == ["late"]


# --- the command --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SWARM_PRESETS)
def test_presets_can_be_read(name: str) -> None:
    assert read_scenario(name).name == name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[peers]]\nname = 'a'\ncount = 8\nsped = 1\n", 'Did you mean "speed"?'),
        ("[[peers]]\nname = 'a'\ncount = 8\nspeed = -1\n", "peers.0.speed cannot be used"),
        ("[[peers]]\nname = 'a'\ncount = 1\n", "too few for run.stages 2"),
        ("[run]\nstages = 2\n", "peers is missing"),
        ("[run\n", "is not TOML"),
        ("[run]\nminutes = 1\n[[peers]]\nname='a'\ncount=8\n", "run.warm_up 2 must be below run.minutes 1"),
    ],
)
def test_a_wrong_scenario_is_named_in_a_sentence(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ScenarioError, match="wrong") as problem:
        read_scenario(str(file))
    assert said in str(problem.value)
    answer = CliRunner().invoke(app, ["simulate", "swarm", str(file)])
    assert answer.exit_code == 2
    assert "Traceback" not in answer.output


def test_an_unknown_preset_is_named_with_those_there_are() -> None:
    with pytest.raises(ScenarioError, match="lab-8"):
        read_scenario("lab-9")


def test_the_command_tells_and_its_exit_code_says_whether_bounds_hold(tmp_path: Path) -> None:
    file, page = tmp_path / "one.toml", tmp_path / "page.html"
    file.write_text(
        "[run]\nminutes = 3\nwarm_up = 1\n[[peers]]\nname = 'fast'\ncount = 4\nspeed = 4\n[[peers]]\n"
        "name = 'slow'\ncount = 4\nspeed = 0.1\n",
        encoding="utf-8",
    )
    answer = CliRunner().invoke(app, ["simulate", "swarm", str(file), "--json", "--page", str(page)])
    told = json.loads(answer.stdout)
    assert answer.exit_code == int(any(not check["holds"] for check in told["checks"]))
    assert told["throughput"] is not None
    text = page.read_text(encoding="utf-8")
    assert "Throughput by the ideal" in text
    assert "http" not in text.replace("</html>", "")
    shown = CliRunner().invoke(app, ["simulate", "swarm", str(file), "--seed", "3"], env={"COLUMNS": "200"})
    assert "throughput by the sum of speeds" in shown.output


def test_a_page_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    world, outcome, checks = simulated(small(minutes=3.0))
    with pytest.raises(Exception, match="Choose another file"):
        write_page(tmp_path / "none" / "page.html", world, outcome, checks)


def test_the_presets_are_listed_where_none_is_named() -> None:
    answer = CliRunner().invoke(app, ["simulate", "swarm"])
    assert answer.exit_code == 0
    lines = answer.output.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(SWARM_PRESETS)
    assert all(len(line) <= 80 and line.endswith(".") for line in lines)
