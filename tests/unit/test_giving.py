"""What a volunteer allows, and what a node makes of it: pure, with times and readings made up."""

from __future__ import annotations

import math
import os
import sys
from collections import namedtuple
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from node.config import NodeConfig, build_config
from node.giving import sensors
from node.giving.bandwidth import most_by_bandwidth
from node.giving.line import Line as NodeLine
from node.giving.policy import COOL, Conditions, Policy, VolunteerLimits
from node.machine.duty import Duty
from node.machine.limits import parse_rate
from node.process.serving import config_of
from node.storage.state_directory import StateDirectory
from protocol.errors import UserError
from protocol.run.manifest import load_preset
from protocol.transport.base import Transport

NOW = 1.8e9  # seconds since 1970

NOON, NIGHT = datetime(2026, 11, 24, 12, 0), datetime(2026, 11, 24, 23, 30)


def limits(**settings: object) -> VolunteerLimits:
    return VolunteerLimits.of(NodeConfig.model_validate(settings))


# --- what people write ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rate"),
    [("20Mbit", 2.5e6), ("20 mbit/s", 2.5e6), ("1.5Gbps", 187.5e6), ("500kbit", 62_500), ("2.5MB/s", 2.5e6)],
)
def test_bandwidths(text: str, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("max_upload", "20"),
        ("max_upload", "0Mbit"),
        ("max_download", "20MiB"),
        ("monthly_cap", "lots"),
        ("gpu_percent", 0),
        ("gpu_percent", 101),
        ("hours", "22"),
        ("hours", "25-07"),
        ("hours", "22-07:61"),
        ("max_temperature", 500),
        ("hours", "mon-fr"),
        ("network_hours", "22-07,"),
    ],
)
def test_nonsense_is_refused_by_its_flag(flag: str, value: object) -> None:
    with pytest.raises(UserError, match="--" + flag.replace("_", "-")):
        build_config({flag: value}, {})


def test_several_nodes_of_one_command_share_the_network() -> None:
    whole = NodeConfig.model_validate({"max_upload": "20Mbit", "monthly_cap": "100GB", "gpu_percent": 50})
    part = config_of(whole, 1, [f"cuda:{number}" for number in range(4)])
    assert parse_rate(part.max_upload) == pytest.approx(20e6 / 8 / 4)
    assert (part.monthly_cap, part.max_download, part.gpu_percent) == (str(25 * 10**9), "", 50)


# --- what a node makes of it ----------------------------------------------------------------------


def test_without_limits_it_runs_whatever_happens() -> None:
    policy = Policy(limits())
    assert policy.judge(Conditions(NOON, 10**15, 200.0)).share == 1.0
    assert not limits().need_watching
    assert not limits(gpu_percent=50, max_upload="1Mbit").need_watching


def test_outside_of_its_hours_it_rests_and_says_when_it_goes_on() -> None:
    policy = Policy(limits(hours="22-07"))
    assert policy.judge(Conditions(NIGHT)).share == 1.0
    verdict = policy.judge(Conditions(NOON))
    assert verdict.share == 0.0
    assert verdict.reason == "It is Tue 12:00, outside of --hours 22-07; they begin on Tue at 22:00."


def test_it_says_by_which_limits_it_rests_and_whether_the_network_is_to_be_left_alone() -> None:
    policy = Policy(limits(hours="22-07", network_hours="mon-fri 20-23, sat-sun"))
    assert policy.judge(Conditions(datetime(2026, 11, 24, 22, 30))).share == 1.0
    late = policy.judge(Conditions(NIGHT))
    assert (late.share, late.is_quiet) == (0.0, True)
    assert late.reason == (
        "It is Tue 23:30, outside of --network-hours mon-fri 20-23, sat-sun; they begin on Wed at 20:00."
    )
    early = policy.judge(Conditions(datetime(2026, 11, 24, 20, 30)))
    assert (early.share, early.is_quiet) == (0.0, False)
    both = policy.judge(Conditions(NOON, others="ann is at the machine."))
    assert "--hours" in both.reason
    assert "--network-hours" in both.reason
    assert "ann" in both.reason


def test_a_month_that_is_used_up_ends_with_the_month(tmp_path: Path) -> None:
    class Line(Transport):  # type: ignore[misc]
        sent = 0

        def moved(self) -> tuple[int, int]:
            return self.sent, 0

    Line.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    line, state, policy = Line(), StateDirectory(tmp_path), Policy(limits(monthly_cap="5GB"))  # type: ignore[abstract]
    month = NodeLine(state, line, NOON)
    line.sent = 3 * 10**9
    assert policy.judge(Conditions(NOON, month.moved(NOON))).share == 1.0
    month.save(NOON)
    later = Line()  # type: ignore[abstract]
    month = NodeLine(state, later, NOON)  # the node was started again
    later.sent = 2 * 10**9 + 1
    verdict = policy.judge(Conditions(NOON, month.moved(NOON)))
    assert verdict.share == 0.0
    assert "5.0 of 5.0 GB of this month are used up" in verdict.reason
    assert "next month" in verdict.reason
    december = datetime(2026, 12, 1, 0, 0)
    assert policy.judge(Conditions(december, month.moved(december))).share == 1.0
    assert month.moved(december) == 0


def test_a_hot_device_computes_less_then_rests_and_goes_on_only_when_it_is_cool() -> None:
    policy = Policy(limits(max_temperature=85))
    shares = [policy.judge(Conditions(NOON, temperature=90.0)) for _ in range(8)]
    assert shares[0].share == pytest.approx(0.7)
    assert "90 °C" in shares[0].reason
    assert [s.share for s in shares] == sorted((s.share for s in shares), reverse=True)
    assert shares[-1].share == 0.0
    assert policy.judge(Conditions(NOON, temperature=84.0)).share == 0.0  # below, and not cool yet
    resumed = policy.judge(Conditions(NOON, temperature=85 - COOL)).share
    assert 0.0 < resumed < 0.2
    for _ in range(40):
        last = policy.judge(Conditions(NOON, temperature=70.0))
    assert (last.share, last.reason) == (1.0, "")


def test_a_temperature_at_the_limit_changes_nothing_back_and_forth() -> None:
    policy = Policy(limits(max_temperature=85, gpu_percent=80))
    assert {policy.judge(Conditions(NOON, temperature=t)).share for t in (84.0, 85.0, 83.0, 85.0)} == {0.8}


def test_while_others_use_the_machine_it_rests() -> None:
    policy = Policy(limits(only_idle=True))
    assert policy.judge(Conditions(NOON, others="ann is at the machine.")).reason == "ann is at the machine."
    assert policy.judge(Conditions(NOON)).share == 1.0


def test_changed_limits_hold_at_the_next_look_and_a_hot_device_stays_hot() -> None:
    policy = Policy(limits(hours="22-07", max_temperature=85, gpu_percent=50))
    assert policy.judge(Conditions(NIGHT, temperature=90.0)).share == pytest.approx(0.35)
    policy.change(limits(max_temperature=80, gpu_percent=100))
    assert policy.judge(Conditions(NOON, temperature=79.0)).share == pytest.approx(0.7)
    for _ in range(8):
        assert policy.judge(Conditions(NOON, temperature=95.0)).share < 0.6
    policy.change(limits(max_temperature=90))
    assert policy.judge(Conditions(NOON, temperature=85.0)).share == 0.0
    policy.change(limits(gpu_percent=30))
    assert policy.judge(Conditions(NOON, temperature=None)).share == 0.3


# --- the share of the time -------------------------------------------------------------------------


def test_time_without_work_counts_as_rest() -> None:
    duty = Duty(0.5)
    assert duty.rest(10.0, 10.1) < 0.1
    assert duty.rest(20.0, 20.1) == 0.0  # nothing was to be done for ten seconds
    assert duty.rest(20.1, 21.1) == pytest.approx(1.0, abs=0.21)


def test_a_larger_share_ends_the_rest_for_a_smaller_one() -> None:
    duty = Duty(0.01)
    assert duty.rest(10.0, 12.0) == pytest.approx(198.0, abs=1)
    assert not duty.has_risen()
    duty.share = 0.5
    assert duty.has_risen()
    assert duty.rest(13.0, 14.0) == pytest.approx(1.0, abs=0.21)
    duty.share = 0.25
    assert not duty.has_risen()
    assert duty.rest(15.0, 16.0) == pytest.approx(3.0, abs=0.21)
    duty.share = 1.0
    assert duty.rest(17.0, 18.0) == 0.0
    duty.share = 0.5
    assert duty.rest(18.0, 19.0) == pytest.approx(1.0, abs=0.21)


def test_bandwidth_limits_are_told_as_a_lower_capacity() -> None:
    manifest = load_preset("tiny")
    nbytes = 4 * 2 * 128 * 64  # float32 [sequences, tokens, hidden]
    config = NodeConfig(max_upload="8Mbit")
    assert most_by_bandwidth(config, manifest, 0) == pytest.approx(1e6 / nbytes)
    assert most_by_bandwidth(
        NodeConfig(max_upload="8Mbit", max_download="4Mbit"), manifest, 1
    ) == pytest.approx(5e5 / nbytes)
    assert most_by_bandwidth(NodeConfig(), manifest, 0) == math.inf


# --- readings --------------------------------------------------------------------------------------

User = namedtuple("User", ["name", "terminal"])


def users(monkeypatch: pytest.MonkeyPatch, *found: tuple[str, str]) -> None:
    monkeypatch.setattr("psutil.users", lambda: [User(*user) for user in found])
    monkeypatch.setattr(sys, "platform", "linux")


def test_whoever_typed_lately_is_at_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensors, "TERMINALS", tmp_path)
    terminal, now = tmp_path / "tty1", NOW
    terminal.touch()
    users(monkeypatch)
    assert sensors.somebody(now) == ""
    users(monkeypatch, ("ann", "tty1"))
    os.utime(terminal, (now - 10, now))
    assert sensors.somebody(now) == "ann is at the machine."
    os.utime(terminal, (now - 3600, now))
    assert sensors.somebody(now) == ""


def test_a_graphical_session_is_idle_only_if_the_system_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"hint": "no"}

    def run(command: tuple[str, ...], **_: object) -> SimpleNamespace:
        if command[1] == "list-sessions":
            return SimpleNamespace(returncode=0, stdout=" 2 1000 ann seat0 tty2\n", stderr="")
        told = f"Name=ann\nType=wayland\nIdleHint={said['hint']}\n"
        return SimpleNamespace(returncode=0, stdout=told, stderr="")

    users(monkeypatch, ("ann", ":0"))
    monkeypatch.setattr("subprocess.run", run)
    assert sensors.somebody(NOW) == "ann is at the machine."
    said["hint"] = "yes"
    assert sensors.somebody(NOW) == ""

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("subprocess.run", missing)
    assert sensors.somebody(NOW) == "ann is at the machine."  # it cannot be told


@pytest.mark.parametrize(
    ("supplies", "on_battery"),
    [
        ({}, False),  # a desktop, a container
        ({"AC": "Mains online=1", "BAT0": "Battery status=Full"}, False),
        ({"AC": "Mains online=1", "BAT0": "Battery status=Discharging"}, False),  # too weak a charger
        ({"AC": "Mains online=0", "BAT0": "Battery status=Discharging"}, True),
        ({"BAT0": "Battery status=Discharging"}, True),
        ({"BAT0": "Battery status=Charging", "ucsi": "USB online=1"}, False),
        ({"ucsi1": "USB online=0", "ucsi2": "USB online=1", "BAT0": "Battery status=Discharging"}, False),
        ({"mouse": "Battery scope=Device status=Discharging"}, False),
        ({"ups": "UPS status=Discharging"}, True),
    ],
)
def test_a_machine_on_its_battery_is_not_idle(
    supplies: dict[str, str], on_battery: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, told in supplies.items():
        kind, *facts = told.split()
        (tmp_path / name).mkdir()
        for fact, value in [("type", kind), *(fact.split("=") for fact in facts)]:
            (tmp_path / name / fact).write_text(f"{value}\n")
    monkeypatch.setattr(sensors, "POWER", tmp_path)
    users(monkeypatch)
    assert sensors.others(torch.device("cpu")) == ("The machine runs on its battery." if on_battery else "")


@pytest.mark.parametrize(("source", "on_battery"), [("Battery", True), ("AC", False)])
def test_a_mac_on_its_battery_is_not_idle(
    source: str, on_battery: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: tuple[str, ...], **_: object) -> SimpleNamespace:
        told = f"Now drawing from '{source} Power'\n -InternalBattery-0 (id=1) 80%; charging\n"
        idle = '  "HIDIdleTime" = 900000000000\n'
        return SimpleNamespace(returncode=0, stdout=told if command[0] == "pmset" else idle, stderr="")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("subprocess.run", run)
    assert bool(sensors.others(torch.device("cpu"))) is on_battery


def test_programs_on_the_gpu_are_told_apart_from_this_one_also_in_a_container() -> None:
    assert not sensors.are_others(set(), 7, computes_here=False)
    assert sensors.are_others({4711}, 7, computes_here=False)
    assert not sensors.are_others({7}, 7, computes_here=True)
    assert sensors.are_others({7, 4711}, 7, computes_here=True)
    assert not sensors.are_others({4711}, 7, computes_here=True)  # this one, by the machine's number
    assert sensors.are_others({4711, 4712}, 7, computes_here=True)


def test_a_machine_that_tells_no_temperature_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    Entry = namedtuple("Entry", ["current"])
    monkeypatch.setattr("psutil.sensors_temperatures", lambda: {"nvme": [Entry(40.0)]}, raising=False)
    with pytest.raises(UserError, match="--gpu-percent"):
        sensors.thermometer(torch.device("cpu"))
    told = {"nvme": [Entry(90.0)], "coretemp": [Entry(61.0), Entry(64.5)]}
    monkeypatch.setattr("psutil.sensors_temperatures", lambda: told, raising=False)
    assert sensors.thermometer(torch.device("cpu"))() == 64.5
