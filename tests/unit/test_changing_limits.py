"""Limits that a volunteer changes: what is sent to nodes, what they make of it, and what the volunteer is told."""

from __future__ import annotations

import tomllib
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from bootstrap.inspect.node_cli import lines_of
from bootstrap.inspect.node_limits import as_order, kept_by, told
from node.config import NodeConfig, build_config
from node.giving.limits import LIMITS, Limit, changed, limits_of
from node.giving.line import QUIET, Line
from node.storage.state_directory import StateDirectory
from protocol.errors import UserError
from protocol.transport.base import Transport

NOON = datetime(2026, 11, 24, 12, 0)


class Wire(Transport):  # type: ignore[misc]
    """A transport of which only what its line carries is asked."""

    sent = received = 0
    limited: tuple[float, float] | None = None

    def moved(self) -> tuple[int, int]:
        return self.sent, self.received

    def limit(self, upload: float, download: float) -> None:
        self.limited = upload, download


Wire.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


def test_limits_change_and_the_other_settings_stay() -> None:
    config = build_config({"join": ["/a"], "max_upload": "20Mbit", "hours": "22-07", "gpu_percent": 60}, {})
    new = changed(
        config,
        {
            "max_upload": "5Mbit",
            "hours": "none",
            "gpu_percent": "None",
            "only_idle": True,
            "monthly_cap": "1TB",
        },
    )
    assert (new.max_upload, new.hours, new.gpu_percent, new.only_idle) == ("5Mbit", "", 100, True)
    assert new.monthly_cap == "1TB"
    assert new.join == config.join
    assert changed(new, {"only_idle": False}).only_idle is False
    assert {name: limit for name, limit in limits_of(new).items() if limit} == {
        "max_upload": "5Mbit",
        "monthly_cap": "1TB",
        "only_idle": "yes",
    }


@pytest.mark.parametrize(
    ("wishes", "named"),
    [
        ({"max_upload": "fast"}, "--max-upload"),
        ({"gpu_percent": "0"}, "--gpu-percent"),
        ({"hours": "x" * 1000}, "--hours"),
        ({"only_idle": "perhaps"}, "--only-idle"),
        ({"max_upload": ["5Mbit"]}, "--max-upload"),
        ({"state_dir": "/"}, "no limit of a running node"),
    ],
)
def test_what_is_no_limit_is_refused_by_its_name(wishes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        changed(NodeConfig(), wishes)


def test_nodes_of_one_command_share_the_network_and_each_has_the_other_limits() -> None:
    order = as_order(
        {"max_upload": "20Mbit", "monthly_cap": "100GB", "gpu_percent": "50", "hours": "none"}, 4
    )
    assert order == {
        "max_upload": "5Mbit",
        "monthly_cap": str(25 * 10**9),
        "gpu_percent": "50",
        "hours": "",
    }
    assert as_order({"max_upload": "2.5MB/s", "only_idle": True}, 1) == {
        "max_upload": "2.5MB/s",
        "only_idle": True,
    }
    assert as_order({"max_upload": "none", "monthly_cap": "none"}, 4) == {"max_upload": "", "monthly_cap": ""}
    with pytest.raises(UserError, match="--hours"):
        as_order({"hours": "noon"}, 4)


def test_the_lines_that_keep_a_change_are_a_settings_file_with_it(tmp_path: Path) -> None:
    wishes: dict[str, Limit] = {
        "max_upload": "5Mbit",
        "gpu_percent": "50",
        "hours": "mon-fri 22-07, sat-sun",
        "only_idle": True,
    }
    first, *lines = kept_by(wishes, is_one_of_several=False)
    assert "until the node ends" in first
    assert set(tomllib.loads("\n".join(lines))) == set(wishes)
    file = tmp_path / "settings.toml"
    file.write_text("\n".join(lines))
    config = build_config({}, {}, file)
    assert (config.max_upload, config.gpu_percent, config.only_idle) == ("5Mbit", 50, True)
    file.write_text("\n".join(kept_by(dict.fromkeys(LIMITS, "none"), is_one_of_several=False)[1:]))
    assert build_config({}, {}, file) == NodeConfig()
    [alone] = kept_by(wishes, is_one_of_several=True)
    assert "start this device's node by itself" in alone


def test_each_limit_is_shown_with_what_it_limits() -> None:
    report = {
        "peer": "12D3KooWabcdefgh",
        "state": "paused",
        "healthy": True,
        "device": "cuda:1",
        "paused": "It is day.",
        "limits": {
            "max-upload": {"limit": "20Mbit", "now": "18.20 Mbit/s at present"},
            "hours": {"limit": "", "now": "it is Tue 12:00"},
            "only-idle": {"limit": "", "now": ""},
        },
    }
    assert told(report) == [
        "Node …abcdefgh on cuda:1: paused.",
        "It rests: It is day.",
        "  max-upload      20Mbit        18.20 Mbit/s at present",
        "  hours           none          it is Tue 12:00",
        "  only-idle       none",
    ]
    assert told(report | {"name": "Noor"})[0] == "Node Noor (…abcdefgh) on cuda:1: paused."
    assert lines_of(report)[-1] == "max-upload: 20Mbit (18.20 Mbit/s at present)"


def test_a_line_is_limited_as_it_was_told_and_nearly_silent_outside_of_the_network_hours(
    tmp_path: Path,
) -> None:
    wire = Wire()  # type: ignore[abstract]
    line = Line(StateDirectory(tmp_path), wire, NOON, lambda: 0.0)
    line.limit(2.5e6, 0.0, is_quiet=False)
    assert wire.limited == (2.5e6, 0.0)
    line.limit(2.5e6, 0.0, is_quiet=True)
    assert wire.limited == (QUIET, QUIET)
    line.limit(1e3, 0.0, is_quiet=True)
    assert wire.limited == (1e3, QUIET)
    line.limit(0.0, 0.0, is_quiet=False)
    assert wire.limited == (0.0, 0.0)


def test_the_present_rate_is_that_of_the_last_seconds(tmp_path: Path) -> None:
    seconds, wire = [0.0], Wire()  # type: ignore[abstract]
    line = Line(StateDirectory(tmp_path), wire, NOON, lambda: seconds[0])
    for _ in range(20):
        seconds[0] += 5.0
        wire.sent += 5_000_000
        line.look()
    seconds[0] += 1.0
    line.look()  # too soon to be one
    wire.received += 600
    sent, received = line.rates()
    assert sent == pytest.approx(5e6 / 6)
    assert received == 100.0
