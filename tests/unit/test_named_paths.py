"""Each path that a person can name, at each option of each command: what cannot serve is one sentence, and no more."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bootstrap.tools_cli import app as tools
from node.command import uses_of
from node.config import NodeConfig, build_config
from node.machine.named import Use, is_there, look_at, require_use, shown
from protocol.errors import MEND, CheckpointError, UserError
from tests.unit.test_data import without_privileges

FILES, FOLDERS = {Use.READ_FILE, Use.WRITE_FILE}, {Use.READ_FOLDER, Use.WRITE_FOLDER}
WRITTEN = {Use.WRITE_FILE, Use.WRITE_FOLDER}
NAMES_OF_THE_HUB = {"from_checkpoint", "tokenizer"}
REQUIRED = {  # words that a command does not do without, by the parameter that they are of
    "export": {"out": ["--out", "model"]},
    "delegate": {"file": ["friend.delegate"]},
    "revoke": {"named": ["0" * 32]},
    "tokenizer": {"texts": ["python-stdlib"]},
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


Case = tuple[tuple[str, ...], str, Use, str]
CASES: list[Case] = [
    (words, name, use, named) for words, command in commands(tools) for name, use, named in uses_of(command)
]


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


def no_text(scratch: Path, is_folder: bool) -> Path:
    return scratch / os.fsdecode(b"caf\xe9")


EVERY = set(Use)
ODD: list[tuple[Callable[[Path, bool], Path], set[Use]]] = [
    (closed, EVERY),
    (folder_of_another, FOLDERS | {Use.READ, Use.TEXT}),
    (loop, EVERY),
    (long_name, EVERY),
    (below_a_file, EVERY),
    (pipe, EVERY),
    (device, EVERY - {Use.WRITE_FILE}),
    (other_kind, FILES | FOLDERS),
    (link_to_nothing, {Use.READ_FILE, Use.TEXT}),
    (no_text, {Use.READ_FILE, Use.TEXT}),
]


def argv_of(case: Case, place: Path) -> list[str]:
    words, name, _, named = case
    others = [word for other, given in REQUIRED.get(words[-1], {}).items() if other != name for word in given]
    return [*words, *others, *([named, str(place)] if named.startswith("--") else [str(place)])]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd[0].__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{' '.join(case[0])} {case[3]}")
def test_what_cannot_serve_is_one_sentence(
    case: Case, odd: tuple[Callable[[Path, bool], Path], set[Use]], scratch: Path
) -> None:
    make, uses = odd
    if case[2] not in uses:
        return
    place = make(scratch, case[2] in FOLDERS)
    before = sorted(scratch.rglob("*"))
    with without_privileges():
        answer = CliRunner().invoke(tools, argv_of(case, place))
    assert answer.exit_code == MEND, (answer.output, answer.exception)
    assert isinstance(answer.exception, SystemExit)
    [line] = [line for line in answer.output.splitlines() if not line.endswith("…")]
    assert line.startswith("error: ")
    assert line.endswith(".")
    assert "[Errno" not in line
    assert sorted(scratch.rglob("*")) == before


def test_all_that_may_be_a_path_says_what_it_is_for() -> None:
    """A new option of the type Path, or named as those that may be paths, is in the table by itself."""
    import inspect

    for words, command in commands(tools):
        known = {name for name, _, _ in uses_of(command)}
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
            if "Path" in str(parameter.annotation) or name in {"data", "tokenizer", "from_checkpoint"}:
                assert name in known, f"{' '.join(words)} {name}: say what it is for, as Use.READ_FILE"
