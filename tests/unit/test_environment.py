"""NOLOCO_… variables: settings, mistyped ones, those that nobody knows, and those of services."""

from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

from bootstrap.found_cli import app as founding
from bootstrap.tools_cli import app as tools
from node.cli import app as volunteering
from node.command import App
from node.config import NodeConfig
from node.machine.environment import drop_service_links, is_service_link, unknown_in
from protocol.errors import MEND

PROGRAMS = {
    "noloco-node": (volunteering, ["--join", "nowhere"], "Cannot use the address 'nowhere'"),
    "noloco-bootstrap": (founding, ["--dashboard", "nowhere"], "'nowhere' is not HOST:PORT"),
    "noloco": (tools, ["watch"], "Say where the curves go"),
}
LINKS = {
    "NOLOCO_SERVICE_HOST": "10.0.0.1",
    "NOLOCO_SERVICE_PORT": "5432",
    "NOLOCO_SERVICE_PORT_LIBP2P": "5432",
    "NOLOCO_PORT": "tcp://10.0.0.1:5432",
    "NOLOCO_PORT_5432_TCP": "tcp://10.0.0.1:5432",
    "NOLOCO_PORT_5432_TCP_PROTO": "tcp",
    "NOLOCO_PORT_5432_TCP_PORT": "5432",
    "NOLOCO_PORT_5432_UDP_ADDR": "10.0.0.1",
    "NOLOCO_SEED_PEER_SERVICE_HOST": "10.0.0.2",
    "NOLOCO_SEED_PEER_PORT": "udp://10.0.0.2:1",
}


def test_variables_of_services_are_no_settings() -> None:
    outside = {"NOLOCO_JOIN": "here", "NOLOCO_ANNOUNCE": "/ip4/10.0.0.1/tcp/1", "HOME": "/"}
    environment = outside | LINKS
    drop_service_links(environment)
    assert environment == outside
    assert not is_service_link("NOLOCO_PORT", "31337")
    assert not is_service_link("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert not any(is_service_link(f"NOLOCO_{name.upper()}", "1") for name in NodeConfig.model_fields)


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_program_takes_a_service_for_a_setting(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app, arguments, _ = PROGRAMS[program]
    for name, value in LINKS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        app(args=arguments)
    assert ended.value.code == MEND
    assert not set(LINKS) & set(os.environ)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_warns_of_what_it_does_not_know_and_refuses_what_is_mistyped(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, arguments, told = PROGRAMS[program]
    monkeypatch.setenv("NOLOCO_NAMESPACE", "default")
    warned = CliRunner().invoke(app, arguments)
    assert "warning: NOLOCO_NAMESPACE is not a setting. Did you mean NOLOCO_NAME?" in warned.output
    assert told in warned.output
    monkeypatch.setenv("NOLOCO_JION", "somewhere")
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == MEND
    assert refused.output == "error: NOLOCO_JION is not a setting. Did you mean NOLOCO_JOIN?\n"


@pytest.mark.parametrize(
    ("name", "is_mistyped"),
    [
        ("JION", True), ("JOINS", True), ("STATEDIR", True), ("MAX_UPLOD", True), ("TOKN", True), ("DATAS", True),
        ("NAMESPACE", False), ("QQQQ", False), ("HOME", False), ("VERSION", False), ("NODE_IP", False),
        ("RELEASE", False), ("LOG_LEVEL", False),
    ],
)  # fmt: skip
def test_only_near_misses_are_mistyped(name: str, is_mistyped: bool) -> None:
    [unknown] = unknown_in({f"NOLOCO_{name}": "x", "HOME": "/"}, NodeConfig.model_fields)
    assert unknown.is_mistyped == is_mistyped
    assert unknown.variable == f"NOLOCO_{name}"


def test_what_a_program_of_ours_reads_is_known() -> None:
    known = {"PRESET": "tiny", "IMAGE": "x", "STATE": "x", "KEEP": "1", "DASHBOARD": ":1", "TOKEN": "x"}
    assert not list(
        unknown_in({f"NOLOCO_{name}": value for name, value in known.items()}, NodeConfig.model_fields)
    )


def test_help_comes_whatever_the_variables_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOLOCO_JION", "somewhere")
    for app, arguments in (
        (tools, ["status", "--help"]),
        (founding, ["invite", "--help"]),
        (volunteering, ["--help"]),
    ):
        assert isinstance(app, App)
        answer = CliRunner().invoke(app, arguments)
        assert answer.exit_code == 0, answer.output
        assert "JION" not in answer.output
