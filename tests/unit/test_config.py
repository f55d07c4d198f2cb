"""Settings: flags before environment before file before defaults, and errors that name the flag."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from node.command import options_from
from node.config import NodeConfig, build_config
from protocol.errors import UserError
from protocol.records.identity import Identity


def settings_file(folder: Path, text: str) -> Path:
    path = folder / "node.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_with_nothing_given_the_defaults_hold() -> None:
    assert build_config({}, {}) == NodeConfig()
    assert build_config(dict.fromkeys(NodeConfig.model_fields), {}) == NodeConfig()  # flags not given


def test_each_source_yields_to_the_one_before_it(tmp_path: Path) -> None:
    file = settings_file(tmp_path, "port = 1\nthreads = 1\nstage = 1\n")
    environment = {"NOLOCO_PORT": "2", "NOLOCO_THREADS": "2"}
    config = build_config({"port": 3, "threads": None}, environment, file)
    assert (config.port, config.threads, config.stage, config.device) == (3, 2, 1, "auto")


def test_a_list_in_the_environment_is_separated_by_spaces() -> None:
    config = build_config({}, {"NOLOCO_JOIN": "/ip4/1.2.3.4/tcp/1 /ip4/5.6.7.8/tcp/2"})
    assert config.join == ("/ip4/1.2.3.4/tcp/1", "/ip4/5.6.7.8/tcp/2")


def test_an_empty_variable_is_as_good_as_none() -> None:
    assert build_config({}, {"NOLOCO_PORT": ""}).port == 0


@pytest.mark.parametrize(("text", "value"), [("0", False), ("false", False), ("1", True), ("yes", True)])
def test_a_switch_in_the_environment(text: str, value: bool) -> None:
    assert build_config({}, {"NOLOCO_RELAY": text}).relay is value


@pytest.mark.parametrize(
    ("flags", "environment", "named"),
    [
        ({"port": 70_000}, {}, "--port"),
        ({}, {"NOLOCO_PORT": "http"}, "NOLOCO_PORT"),
        ({}, {"NOLOCO_STAGE": "first"}, "NOLOCO_STAGE"),
        ({"stage": -2}, {"NOLOCO_STAGE": "1"}, "--stage"),
        ({"stage": -2}, {}, "--stage"),
        ({"max_minutes": -1.0}, {}, "--max-minutes"),
        ({"checkpoint_minutes": 0.0}, {}, "--checkpoint-minutes"),
        ({}, {"NOLOCO_RELAY": "perhaps"}, "NOLOCO_RELAY"),
    ],
)
def test_a_bad_setting_is_named_as_it_was_given(
    flags: dict[str, Any], environment: dict[str, str], named: str
) -> None:
    with pytest.raises(UserError, match=f"{named}: "):
        build_config(flags, environment)


def test_all_bad_settings_are_told_at_once() -> None:
    with pytest.raises(UserError, match=r"(?s)--stage.*--port"):
        build_config({"port": -1, "stage": -2}, {})


def test_an_unknown_setting_in_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"prot in \S+node\.toml: .* Did you mean port\?"):
        build_config({}, {}, settings_file(tmp_path, "prot = 1\n"))


@pytest.mark.parametrize(
    "name", [name for name, field in NodeConfig.model_fields.items() if "tuple" in str(field)]
)
def test_one_text_in_the_file_is_a_list_of_one(name: str, tmp_path: Path) -> None:
    address = f"/ip4/203.0.113.7/tcp/1/p2p/{Identity.from_seed('someone').peer_id}"
    value = address if name == "join" else address.partition("/p2p/")[0]
    given = build_config({}, {}, settings_file(tmp_path, f"{name} = '{value}'\n"))
    assert getattr(given, name) == (value,)


@pytest.mark.parametrize(
    "value", ["7.5", "true", "[1]", "[[]]", "{a = 1}", "1979-05-27", "'nonsense'", "-1e400"]
)
@pytest.mark.parametrize("name", NodeConfig.model_fields)
def test_a_value_of_another_kind_is_told_in_words_of_the_file(name: str, value: str, tmp_path: Path) -> None:
    try:
        build_config({}, {}, settings_file(tmp_path, f"{name} = {value}\n"))
    except UserError as refusal:
        said = str(refusal)
        assert f"{name} in {tmp_path}" in said or said.startswith(("Cannot ", "nonsense is not a directory"))
        assert not re.search(r"\b(tuple|str|dict|bool|int|instance of|None|NoneType)\b", said), said


def test_a_broken_file_is_named_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"node\.toml.*line 2"):
        build_config({}, {}, settings_file(tmp_path, "port = 1\nthreads = = 2\n"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.toml"):
        build_config({}, {}, tmp_path / "nowhere.toml")


def command() -> tuple[typer.Typer, list[dict[str, Any]]]:
    """A command with an option for each setting, and what it was called with."""
    app, calls = typer.Typer(), []

    @app.command()
    @options_from(NodeConfig)
    def run(**flags: Any) -> None:
        calls.append(flags)

    return app, calls


def test_every_setting_is_an_option_and_its_help_tells_the_default() -> None:
    app, _ = command()
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    for name, field in NodeConfig.model_fields.items():
        assert "--" + name.replace("_", "-") in shown
        assert str(field.description)[:30] in shown
    assert "(default: noloco-state)" in shown
    assert "(default: auto)" in shown


def test_data_may_be_given_several_times_and_the_variable_holds_several() -> None:
    app, calls = command()
    assert CliRunner().invoke(app, ["--data", "a.txt", "--data", "texts/**/*.txt"]).exit_code == 0
    given = ("a.txt", "texts/**/*.txt")
    assert build_config(calls[0], {}).data == given
    assert build_config({}, {"NOLOCO_DATA": " ".join(given)}).data == given


def test_options_that_are_not_given_leave_the_environment_alone() -> None:
    app, calls = command()
    assert CliRunner().invoke(app, ["--join", "/a", "--join", "/b", "--no-relay"]).exit_code == 0
    config = build_config(calls[0], {"NOLOCO_PORT": "7", "NOLOCO_DATA": "x.txt"})
    assert (config.join, config.relay, config.port, config.data) == (("/a", "/b"), False, 7, ("x.txt",))
    assert config.state_dir == Path("noloco-state")
