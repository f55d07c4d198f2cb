"""Each path that a person can name, at each option of each command: what cannot serve is one sentence."""

from __future__ import annotations

import errno
import inspect
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bootstrap.display import write_whole
from bootstrap.generation.exported import load_exported
from bootstrap.tools_cli import app as tools
from node.command import App, uses_of
from node.config import build_config
from node.data.documents import Split, stored_documents
from node.data.hub import HubStream
from node.machine.named import Use, is_there, quoted, require_use, shown
from node.model.pretrained import Pretrained
from node.watch.events import JsonLines
from protocol.errors import MEND, CheckpointError, DataError, StateError, UserError
from protocol.run.manifest import load_toml
from tests.unit import corpora
from tests.unit.test_data import without_privileges

FILES_READ = {Use.READ_FILE, Use.THERE_FILE}
FILES, FOLDERS = {*FILES_READ, Use.WRITE_FILE}, {Use.READ_FOLDER, Use.WRITE_FOLDER}
WRITTEN = {Use.WRITE_FILE, Use.WRITE_FOLDER}
REQUIRED = {  # words that a command does not do without, by the parameter that they are of
    "export": {"out": ["--out", "model"]},
    "delegate": {"file": ["friend.delegate"]},
    "revoke": {"named": ["0" * 32]},
    "tokenizer": {"texts": ["python-stdlib"]},
    "backup": {"file": ["mine.backup"]},
}


def commands(
    app: typer.Typer, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Callable[..., Any]]]:
    for command in app.registered_commands:
        assert command.callback is not None
        yield (*path, command.name or command.callback.__name__), command.callback
    for group in app.registered_groups:
        inner = group.typer_instance
        assert inner is not None
        assert group.name is not None
        if inner.registered_callback is not None and inner.registered_callback.callback is not None:
            yield (*path, group.name), inner.registered_callback.callback
        yield from commands(inner, (*path, group.name))


@dataclass(frozen=True)
class Case:
    """A parameter of a command that is a path."""

    command: Callable[..., Any]
    name: str
    use: Use
    named: str

    def __str__(self) -> str:
        return f"{self.command.__name__} {self.named}"

    def argv(self, place: Path) -> list[str]:
        required = REQUIRED.get(self.command.__name__, {}).items()
        others = [word for name, given in required if name != self.name for word in given]
        return [*others, *([self.named, str(place)] if self.named.startswith("--") else [str(place)])]


CASES = [
    Case(command, *found)
    for command in dict.fromkeys(inspect.unwrap(command) for _, command in commands(tools))
    for found in uses_of(command)
]


@cache
def alone(command: Callable[..., Any]) -> App:
    """A program of that command alone: all of them take a while to be put together."""
    program = App()
    is_group = "context" in inspect.signature(command).parameters
    (program.callback(invoke_without_command=True) if is_group else program.command())(command)
    return program


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that anybody can come to, which is the current one."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o777)
        monkeypatch.chdir(directory)
        yield Path(directory)


def closed(scratch: Path, is_folder: bool) -> Path:
    """In, or itself, a folder of a user that is not this one."""
    (scratch / "closed").mkdir(mode=0o700)
    (scratch / "closed" / "there").mkdir() if is_folder else (scratch / "closed" / "there").write_text("{}")
    return scratch / "closed" / "there"


def folder_of_another(scratch: Path, is_folder: bool) -> Path:
    return closed(scratch, is_folder).parent


def loop(scratch: Path, is_folder: bool) -> Path:
    (scratch / "loop").symlink_to("loop")
    return scratch / "loop"


def long_name(scratch: Path, is_folder: bool) -> Path:
    return scratch / ("x" * 300)


def below_a_file(scratch: Path, is_folder: bool) -> Path:
    (scratch / "file").write_text("{}")
    return scratch / "file" / "there"


def pipe(scratch: Path, is_folder: bool) -> Path:
    os.mkfifo(scratch / "pipe")
    return scratch / "pipe"


def device(scratch: Path, is_folder: bool) -> Path:
    return Path("/dev/null")


def other_kind(scratch: Path, is_folder: bool) -> Path:
    """A file where a folder is due, or the other way round."""
    place = scratch / "other"
    place.write_text("{}") if is_folder else place.mkdir()
    return place


def link_to_nothing(scratch: Path, is_folder: bool) -> Path:
    (scratch / "link").symlink_to("nowhere/at-all")
    return scratch / "link"


def unreadable(scratch: Path, is_folder: bool) -> Path:
    (scratch / "secret").write_text("{}")
    (scratch / "secret").chmod(0)
    return scratch / "secret"


def no_text(scratch: Path, is_folder: bool) -> Path:
    return scratch / os.fsdecode(b"caf\xe9")


EVERY = set(Use)
ODD: list[tuple[Callable[[Path, bool], Path], set[Use]]] = [
    (closed, EVERY),
    (folder_of_another, FOLDERS | {Use.READ, Use.CHECKPOINT, Use.TEXT}),
    (loop, EVERY),
    (long_name, EVERY),
    (below_a_file, EVERY),
    (pipe, EVERY),
    (device, EVERY - {Use.WRITE_FILE}),
    (other_kind, FILES | FOLDERS),
    (unreadable, FILES_READ | {Use.READ, Use.TEXT}),
    (link_to_nothing, FILES_READ | {Use.READ, Use.CHECKPOINT, Use.TEXT}),
    (no_text, FILES_READ | {Use.READ, Use.CHECKPOINT, Use.TEXT}),
]


TABLE = [
    pytest.param(case, make, id=f"{case} {make.__name__}")
    for case in CASES
    for make, uses in ODD
    if case.use in uses
]


@pytest.mark.parametrize(("case", "make"), TABLE)
def test_what_cannot_serve_is_one_sentence(
    case: Case, make: Callable[[Path, bool], Path], scratch: Path
) -> None:
    place = make(scratch, case.use in FOLDERS)
    before = sorted(scratch.rglob("*"))
    with without_privileges():
        answer = CliRunner().invoke(alone(case.command), case.argv(place))
    assert answer.exit_code == MEND, (answer.output, answer.exception)
    assert isinstance(answer.exception, SystemExit)
    [line] = [line for line in answer.output.splitlines() if not line.endswith("…")]
    assert line.startswith("error: ")
    assert line.endswith(".")
    assert "[Errno" not in line
    assert sorted(scratch.rglob("*")) == before


def test_all_that_may_be_a_path_says_what_it_is_for() -> None:
    """A new option of the type Path, or named as those that may be paths, is in the table by itself."""
    for words, command in commands(tools):
        known = {name for name, _, _ in uses_of(command)}
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
            if "Path" in str(parameter.annotation) or name in {"data", "tokenizer", "from_checkpoint"}:
                assert name in known, f"{' '.join(words)} {name}: say what it is for, as Use.READ_FILE"


SYSTEM = [
    errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ESTALE, errno.EIO, errno.ENOTDIR, errno.ENXIO,
    errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.ENOMEM,
]  # fmt: skip


@pytest.mark.parametrize("number", SYSTEM, ids=lambda number: errno.errorcode[number])
def test_whatever_the_system_has_against_a_path_is_one_sentence(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: object, **settings: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "stat", fail)
    with pytest.raises(UserError) as refusal:
        require_use(tmp_path / "there", Use.READ, "--model")
    monkeypatch.undo()
    assert str(refusal.value).startswith(f"Cannot read {tmp_path / 'there'} ({os.strerror(number)}). ")
    assert str(refusal.value).endswith("--model.")


def test_a_name_that_the_system_cannot_take_is_one_sentence(tmp_path: Path) -> None:
    """A NUL cannot be typed, but stand in a settings file."""
    (tmp_path / "node.toml").write_text('trace = "a\\u0000b"\n')
    with pytest.raises(
        UserError, match=r"^Cannot write a\\x00b \(embedded null byte\)\. Choose another trace in "
    ):
        build_config({}, {}, tmp_path / "node.toml")
    with pytest.raises(UserError, match=r"a\\x00b .* another NOLOCO_TOKENIZER"):
        build_config({}, {"NOLOCO_TOKENIZER": "a\0b"})


@pytest.mark.parametrize("name", ["state_dir", "data_cache", "trace", "tokenizer", "from_checkpoint"])
def test_a_nodes_settings_are_asked_about_from_everywhere(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "node.toml").write_text(f'{name} = "{tmp_path / "loop"}"\n')
    for flags, environment, file, named in (
        ({name: str(tmp_path / "loop")}, {}, None, "--" + name.replace("_", "-")),
        ({}, {f"NOLOCO_{name.upper()}": str(tmp_path / "loop")}, None, f"NOLOCO_{name.upper()}"),
        ({}, {}, tmp_path / "node.toml", f"{name} in {tmp_path / 'node.toml'}"),
    ):
        with pytest.raises(UserError) as refusal:
            build_config(flags, environment, file)
        assert "(Too many levels of symbolic links)" in str(refusal.value)
        assert str(refusal.value).endswith(f"hoose another {named}.")


def test_what_can_serve_passes(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9")).write_text("{}")
    (tmp_path / "link").symlink_to("new")
    for place, use in (
        (tmp_path / os.fsdecode(b"caf\xe9"), Use.READ_FILE),
        (tmp_path / "link", Use.WRITE_FILE),
        (tmp_path / "new" / "deep", Use.WRITE_FOLDER),
        (Path("/dev/null"), Use.WRITE_FILE),
        (tmp_path, Use.READ),
    ):
        require_use(place, use, "--out")
    reads, writes = os.pipe()
    require_use(f"/dev/fd/{writes}", Use.WRITE_FILE, "--out")  # as a shell's >(…)
    os.close(reads)
    os.close(writes)


def test_a_path_is_shown_as_text_whatever_is_in_it() -> None:
    assert shown(os.fsdecode(b"caf\xe9")) == r"caf\xe9"
    assert shown("a\x1b[2Jb\u202e") == r"a\x1b[2Jb\u202e"
    assert shown("größe/ü.txt") == "größe/ü.txt"
    assert shown("\ud800x") == r"\ud800x"  # no byte stands for it: of a settings file


def test_a_checkpoint_that_is_not_there_may_be_one_of_the_hub(scratch: Path) -> None:
    require_use("somebody/model", Use.CHECKPOINT, "--from-checkpoint")
    for name in ("somebody", "somebody/model/more", "./model", "/somebody/model", "some body/model"):
        with pytest.raises(UserError, match=r"is not a directory\. Give the one that config\.json"):
            require_use(name, Use.CHECKPOINT, "--from-checkpoint")


def test_what_is_inside_a_folder_is_asked_about_as_well(scratch: Path) -> None:
    place = closed(scratch, is_folder=False)
    with (
        without_privileges(),
        pytest.raises(CheckpointError, match=r"Cannot read .*there \(Permission denied"),
    ):
        is_there(place, CheckpointError)
    assert is_there(place)
    assert not is_there(place / "below")
    assert not is_there(scratch / "nothing")


# --- a name is not always text ------------------------------------------------------------------

CAFE = os.fsdecode(b"caf\xe9")
TEXTS = ["one text", "another text"]
KINDS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: corpora.as_jsonl(path, TEXTS),
    "a.jsonl.gz": lambda path: corpora.as_jsonl(path, TEXTS),
    "texts": lambda path: corpora.as_text(path, TEXTS),
    "rows.parquet": lambda path: corpora.as_parquet(path, TEXTS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_data_in_a_place_whose_name_is_no_text(kind: str, tmp_path: Path) -> None:
    plain, place = tmp_path / "plain", tmp_path / CAFE
    plain.mkdir()
    KINDS[kind](plain / kind)
    plain.rename(place)
    for entry in (place / kind, place / "*" if (place / kind).is_file() else place / kind):
        found = stored_documents([str(entry)], "text", 4_096, Split(0.5), tmp_path / "cache")
        assert sorted([*found.held_out(), *found.training((), 0, 0)]) == sorted(TEXTS)


def test_a_library_that_takes_text_alone_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / CAFE).mkdir()
    (tmp_path / CAFE / "state.json").write_text("{}")
    place = tmp_path / CAFE
    told = r"caf\\xe9 has bytes in its name that are not UTF-8.* Rename it, or name a link to it\.$"
    with pytest.raises(CheckpointError, match=told):
        Pretrained(str(place))
    with pytest.raises(StateError, match=told):
        load_exported(place)
    with pytest.raises(DataError, match=told):
        HubStream(str(place), "text")
    with pytest.raises(DataError, match=told):
        stored_documents([str(place)], "text", 4_096, Split(0.5), tmp_path / "cache")


def test_a_command_to_copy_names_the_same_file() -> None:
    assert quoted(Path("a b/größe")) == "'a b/größe'"
    assert quoted(CAFE + "'s\\n/b") == r"$'caf\xe9\'s\\n/b'"  # as bash reads it
    assert quoted("a\nb") == r"$'a\nb'"


def test_no_name_breaks_what_is_written_or_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Events, a report, what a command prints, a comment in TOML."""
    events = JsonLines(tmp_path / "events.jsonl")
    events({"event": "start", "settings": {"data": [CAFE]}})
    events.close()
    assert json.loads((tmp_path / "events.jsonl").read_text())["settings"] == {"data": [CAFE]}
    write_whole(tmp_path / "report.json", json.dumps({"place": CAFE}, ensure_ascii=False), "")
    assert json.loads((tmp_path / "report.json").read_text().replace("\\", "\\\\"))["place"] == r"caf\udce9"
    tools(["init", str(tmp_path / f"{CAFE}.toml"), "--yes"], standalone_mode=False)
    assert r"caf\udce9.toml" in capsys.readouterr().out
    assert load_toml(tmp_path / f"{CAFE}.toml").name
