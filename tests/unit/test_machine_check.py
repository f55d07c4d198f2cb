"""`noloco manifest check --join`: what a machine could serve in a run, by the checks that a node makes itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bootstrap.checking.costs import FRAMING, traffic_of
from bootstrap.checking.machine_tables import sentences, stage_table
from bootstrap.checking.report import AssumedLinks, speed_of
from bootstrap.checking.this_machine import (
    NamedLinks,
    Resources,
    StageHere,
    StageInRun,
    Visit,
    as_json,
    judged,
    stage_here,
    stages_in_run,
    why_not,
)
from bootstrap.inspect.observer import Sighting
from node.machine.devices import GB, Device
from node.machine.limits import Room
from node.membership.view import Member
from node.model.resources import STARTING, least_memory
from protocol.messages.peers import NodeStats
from protocol.records.announcement import Announcement, State
from protocol.records.identity import Identity
from protocol.run.manifest import load_preset
from protocol.run.signed_manifest import SignedManifest

LARGE = load_preset("llama-125m")
SIGNED = SignedManifest.sign(LARGE, Identity.from_seed("owner"))
STAGES = tuple(StageInRun(stage, 3, 1_500.0) for stage in range(LARGE.stages))
FAST, SLOW = AssumedLinks(10_000.0, 0.01), AssumedLinks(1.0, 0.01)


def machine(
    gigabytes: float = 64.0, disk: float = 500.0, host: float = 64.0, is_gpu: bool = False
) -> Resources:
    device = Device("here", 1.0, 50.0, gigabytes, is_gpu=is_gpu, efficiency=1.0)
    room = Room(int(gigabytes * GB), int(2 * gigabytes * GB), "the container")
    return Resources(device, room, Room(int(host * GB), int(host * GB)), int(disk * GB))


def visit(upload: float | None = None) -> Visit:
    return Visit(SIGNED, STAGES, upload, 0.02 if upload else None)


def test_a_stage_that_fits_is_as_fast_as_the_slower_of_device_and_link() -> None:
    traffic, speed = traffic_of(LARGE, 1, 4), speed_of(LARGE, 1, machine().device).tokens_per_second
    here = stage_here(LARGE, 1, machine(), FAST, 4)
    assert (here.fits, here.why) == ("whole", "")
    assert min(here.computes, here.carries) == here.computes == speed
    assert here.sent == pytest.approx(traffic.sent * FRAMING * speed * 3600)
    assert here.received == pytest.approx(traffic.received * FRAMING * speed * 3600)
    slow = stage_here(LARGE, 1, machine(), SLOW, 4)
    assert min(slow.computes, slow.carries) == slow.carries < slow.computes
    assert slow.sent == pytest.approx(traffic.sent * FRAMING * slow.carries * 3600)
    # a link of 1 Mbit/s carries 450 MB in an hour at most, and in both directions no more than that each
    assert slow.sent < 1e6 / 8 * 3600


def test_a_stage_fits_exactly_where_a_node_takes_it() -> None:
    least = least_memory(LARGE, 0) + STARTING
    enough = machine()
    at_the_edge = replace(enough, room=Room(least, least))
    assert why_not(LARGE, 0, at_the_edge) == ""
    assert stage_here(
        LARGE, 0, replace(at_the_edge, device=replace(enough.device, memory=least / GB)), FAST, 2
    ).fits == ("smaller")
    short = replace(enough, room=Room(least - 1, least))
    assert "needs" in why_not(LARGE, 0, short)
    refused = stage_here(LARGE, 0, short, FAST, 2)
    assert (refused.fits, refused.sent, refused.received) == ("no", 0.0, 0.0)


def test_disk_and_the_memory_beside_a_gpu_count_as_they_do_for_a_node() -> None:
    assert "Checkpoints of stage 0 need" in why_not(LARGE, 0, machine(disk=0.1))
    assert why_not(LARGE, 0, machine(is_gpu=True)) == ""
    assert "beside the device's" in why_not(LARGE, 0, machine(is_gpu=True, host=0.1))
    assert why_not(LARGE, 0, machine(host=0.1)) == ""  # without a GPU there is one memory


def sighting(name: str, stage: int, state: State, rate: float | None) -> Sighting:
    peer = Identity.from_seed(name).peer_id
    member = Member(peer, Announcement(stage=stage, state=state, since=0.0), 100.0)
    stats = (
        None if rate is None else NodeStats(stage=stage, state=state, step=1, round=1, tokens_per_second=rate)
    )
    return Sighting(member, stats)


def test_those_who_serve_are_counted_and_their_rates_are_those_they_tell() -> None:
    seen = [
        sighting("a", 0, "serving", 100.0),
        sighting("b", 0, "serving", 300.0),
        sighting("c", 0, "serving", 140.0),
        sighting("d", 0, "joining", None),
        sighting("e", 1, "serving", None),
    ]
    found = stages_in_run(LARGE, seen)
    assert found[0] == StageInRun(0, 3, 140.0)
    assert found[1] == StageInRun(1, 1, None)


def told(
    resources: Resources, links: AssumedLinks, named: NamedLinks, upload: float | None = None
) -> dict[str, str]:
    run = visit(upload)
    return sentences(run, resources, links, judged(run, resources, links), named, watts=0.0)


def test_the_sentences_say_what_is_measured_and_what_is_not() -> None:
    nothing = NamedLinks(None, None, 1.25e7)
    assumed = told(machine(), FAST, nothing)
    assert "assumed: no member answered probes; name it with --uplink" in assumed["links"]
    assert assumed["power"] == "not known: name the machine's --watts."
    assert assumed["limits"] == "computing, at every stage that fits."
    assert "fits" not in assumed
    measured = told(machine(), SLOW, nothing, upload=1.25e5)
    assert measured["links"].startswith("1.0 Mbit/s up (or more, measured to members)")
    assert measured["links"].endswith("Round trip 20 ms.")
    assert measured["limits"] == "the link, at every stage that fits."
    by_hand = told(machine(), SLOW, NamedLinks(1.25e5, 1.25e5, 1.25e7))
    assert by_hand["links"] == "1.0 Mbit/s up (as you say), 1.0 Mbit/s down (as you say)."


def test_power_is_of_the_device_or_as_named() -> None:
    run, resources = visit(), machine()
    stages = judged(run, resources, FAST)
    nothing = NamedLinks(None, None, 1.25e7)
    assert sentences(run, resources, FAST, stages, nothing, watts=350.0)["power"] == (
        "0.35 kWh an hour at full load of 350 W, 8.4 kWh a day."
    )
    known = replace(resources, device=replace(resources.device, watts=72.0))
    assert sentences(run, known, FAST, stages, nothing, watts=0.0)["power"].startswith("0.07 kWh an hour")


def test_a_machine_that_is_too_small_is_told_why() -> None:
    small = machine(gigabytes=0.1)
    none = told(small, FAST, NamedLinks(None, None, 1.25e7))
    assert none["fits"].startswith("No stage. Stage 0 of run 'llama-125m' needs")
    assert "limits" not in none
    stages = judged(visit(), small, FAST)
    assert as_json(visit(), small, FAST, stages)["ok"] is False
    table = stage_table(LARGE, stages, STAGES, on_host=True)
    assert table.row_count == LARGE.stages
    assert list(table.columns[6].cells) == ["-"] * LARGE.stages


def test_json_has_the_run_and_the_machine_of_each_stage() -> None:
    stages = judged(visit(), machine(), FAST)
    found = as_json(visit(), machine(), FAST, stages)
    assert found["ok"] is True
    assert found["run"] == SIGNED.run_id
    rows = found["stages"]
    assert isinstance(rows, list)
    assert rows[0]["replicas"] == 3
    assert rows[0]["fits"] == "whole"
    assert isinstance(stages[0], StageHere)
