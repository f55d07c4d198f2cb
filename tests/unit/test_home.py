"""~ is a home folder in every path that is a setting, also where no shell expands it; marks before a file's text."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from typer.testing import CliRunner

import node
from bootstrap.creating.choosing import RunOptions
from bootstrap.found_cli import app as founding
from bootstrap.lab.placement.scenario import read_scenario as read_links
from bootstrap.lab.simulated_swarm.swarm_scenario import read_scenario
from bootstrap.tools_cli import app as tools
from node.cli import app as volunteering
from node.command import App
from node.config import NodeConfig, build_config
from node.data.opening import default_cache
from node.data.sources import places_of
from node.data.tokenizer_files import read_tokenizer
from node.machine.home import at_home
from node.model.pretrained import Pretrained
from protocol.errors import CheckpointError, UserError
from protocol.run.manifest import load_toml, preset_text

PATHS = [name for name, field in NodeConfig.model_fields.items() if "Path" in str(field.annotation)]
BOM = "\ufeff"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "home"


def test_a_node_has_settings_that_are_paths() -> None:
    assert {"state_dir", "data_cache", "trace"} <= set(PATHS)


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_every_path_of_a_node_from_everywhere(name: str, source: str, home: Path) -> None:
    flags: dict[str, object] = {name: Path("~/there")} if source == "flag" else {}
    environment = {f"NOLOCO_{name.upper()}": "~/there"} if source == "environment" else {}
    (home / "node.toml").write_text(f'{name} = "~/there"\n' if source == "file" else "")
    config = build_config(flags, environment, Path("~/node.toml"))
    assert getattr(config, name) == home / "there"
    with pytest.raises(UserError, match=r"no user of this machine .* ~nobody-here"):
        build_config({name: Path("~nobody-here/x")}, {})


# --- the commands -------------------------------------------------------------------------------


def functions(app: typer.Typer) -> Iterator[Callable[..., None]]:
    assert isinstance(app, App), "its commands would take ~ for a folder of that name"
    if app.registered_callback is not None and app.registered_callback.callback is not None:
        yield app.registered_callback.callback
    for command in app.registered_commands:
        assert command.callback is not None
        yield command.callback
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from functions(group.typer_instance)


def paths_of(function: Callable[..., None]) -> Iterator[tuple[str, str]]:
    """(parameter, its option or "" for an argument) of those that are paths."""
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if "Path" not in str(parameter.annotation):
            continue
        described = get_args(parameter.annotation)[-1]
        words = (
            described.default,
            *(described.param_decls or ()),
        )  # typer takes the first name for a default
        flags = [str(word) for word in words if str(word).startswith("--")]
        is_option = isinstance(described, typer.models.OptionInfo)
        yield name, (flags or ["--" + name.replace("_", "-")])[0] if is_option else ""


CASES = [
    pytest.param(function, name, option, id=f"{function.__name__} {option or name}")
    for app in (volunteering, founding, tools)
    for function in functions(app)
    for name, option in paths_of(function)
]


@pytest.mark.parametrize(("function", "name", "option"), CASES)
@pytest.mark.parametrize("join", [" ", "="])
def test_every_path_of_every_command(
    function: Callable[..., None], name: str, option: str, join: str, home: Path
) -> None:
    given: dict[str, Any] = {}
    app = App()

    def noted(**settings: object) -> None:
        given.update(settings)

    parameters = inspect.signature(function, eval_str=True).parameters.values()
    wanted = [p for p in parameters if p.name == name]  # others may be required
    noted.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=p.KEYWORD_ONLY) for p in wanted]
    )
    noted.__annotations__ = {p.name: p.annotation for p in wanted}
    app.command()(noted)
    words = f"{option}{join}~/there".split() if option else ["~/there"]
    answer = CliRunner().invoke(app, words)
    if answer.exit_code:  # it must be there, and is not
        assert f"{home / 'there'} (No such file or directory)" in " ".join(answer.output.split()), (
            answer.output
        )
    else:
        assert given[name] in (home / "there", [home / "there"])
    refused = CliRunner().invoke(app, [word.replace("~", "~nobody-here") for word in words])
    assert refused.exit_code == UserError.exit_code
    assert "no user of this machine" in refused.output


def test_every_application_is_one_that_knows_home() -> None:
    """A plain `typer.Typer(` would not."""
    root = Path(node.__file__).parent.parent
    for file in [*root.glob("node/**/*.py"), *root.glob("bootstrap/**/*.py")]:
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call):
                assert ast.unparse(call.func) != "typer.Typer", file


@pytest.mark.parametrize("value", ["", "here", "."])
def test_a_home_that_is_nowhere_is_told(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a container that sets HOME to nothing: ~/x would be /x."""
    monkeypatch.setenv("HOME", value)
    for path in ("~", "~/x"):
        with pytest.raises(UserError, match=r"HOME is .* leads nowhere\. Set HOME"):
            at_home(path)
    assert at_home("/x/~") == Path("/x/~")
    assert at_home("x~") == Path("x~")


def test_paths_that_are_words_like_others(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of the Hub or of a preset may stand in their place."""
    (home / "a.txt").write_text("text")
    assert places_of(["~/a.txt", "~/*.txt", "~"]) == [home / "a.txt", home]
    (home / "tokenizer.json").write_text("{}")
    assert read_tokenizer("~/tokenizer.json") == read_tokenizer("~") == b"{}"
    (home / "model").mkdir()
    assert Pretrained("~/model").name == "model"
    (home / "lab.toml").write_text("")
    readers: list[Callable[[str], object]] = [
        lambda entry: places_of([entry]),
        read_tokenizer,
        Pretrained,
        read_scenario,
    ]
    for reads in readers:
        with pytest.raises(UserError, match="no user of this machine"):
            reads("~nobody-here/x")
    with pytest.raises(UserError, match=f"scenario {home}/lab.toml cannot|{home}/lab.toml cannot"):
        read_scenario("~/lab.toml")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/kept")
    assert default_cache() == home / "kept" / "noloco" / "documents"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == home / ".cache" / "noloco" / "documents"


# --- byte order marks ---------------------------------------------------------------------------


def test_a_mark_before_a_settings_file_a_manifest_and_json(tmp_path: Path) -> None:
    """Windows' editors write it. Of text to train on: test_ways_to_name."""

    def marked(name: str, text: str) -> Path:
        (tmp_path / name).write_text(BOM + text, encoding="utf-8")
        return tmp_path / name

    assert build_config({}, {}, marked("node.toml", "port = 5\n")).port == 5
    plain = tmp_path / "plain.toml"
    plain.write_text(preset_text("tiny"), encoding="utf-8")
    own = marked("run.toml", preset_text("tiny"))
    assert load_toml(own) == load_toml(plain) == RunOptions(file=own).resolved()[0]
    answer = CliRunner().invoke(tools, ["manifest", "check", str(marked("bad.toml", "stages = 0\n"))])
    assert "stages" in answer.output
    assert "Invalid statement" not in answer.output
    assert read_tokenizer(str(marked("tokenizer.json", "{}"))) == b"{}"
    readers: list[Callable[[], object]] = [
        lambda: read_scenario(str(marked("s.toml", ""))),
        lambda: read_links(marked("s.json", "{}")),
    ]
    for read in readers:
        with pytest.raises(UserError) as caught:
            read()
        assert "is not JSON" not in str(caught.value)
        assert "is not TOML" not in str(caught.value)
    marked("config.json", "{}")
    with pytest.raises(CheckpointError) as said:
        RunOptions(from_checkpoint=str(tmp_path)).resolved()
    assert "JSON" not in str(said.value)
