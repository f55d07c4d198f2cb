"""An export replaces what exports have written, and nothing else, wherever it is stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bootstrap.export.folder import (
    PARTIAL,
    SUMS,
    clear_new,
    clear_partial,
    put_in_place,
    require_free,
    write_sums,
)
from bootstrap.export.order import ExportOrder, check_order
from bootstrap.tools_cli import app
from protocol.errors import StateError

NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWB1nCVQyW3BE4zaVYJexq3mR44ZNQQNjX5Q1yseqVU9z4"
BESIDE = ("config.json", "README.md", "tokenizer.json")


def written(directory: Path, contents: str = "1", shards: int = 1) -> None:
    """Make a new export in its folder beside; as `exporting._finish` does, but for what is in the files."""
    (directory / PARTIAL).mkdir(parents=True, exist_ok=True)
    new = clear_new(directory)
    weights = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{n:05}-of-{shards:05}.safetensors" for n in range(shards)]
    )
    for name in (*BESIDE, *weights):
        (new / name).write_text(f"{name} {contents}", encoding="utf-8")
    facts = {"run": "r", "manifest": {}, "version": contents}
    (new / "noloco.json").write_text(json.dumps(facts), encoding="utf-8")
    write_sums(new)


def exported(directory: Path, contents: str = "1", shards: int = 1) -> None:
    check_order(ExportOrder(directory))
    written(directory, contents, shards)
    put_in_place(directory)
    clear_partial(directory)


def seen(directory: Path) -> dict[str, tuple[int, bytes | str | None]]:
    """All that lies in a folder, by name: when it changed, and its contents."""
    found: dict[str, tuple[int, bytes | str | None]] = {}
    for path in sorted(directory.rglob("*")):
        contents = (
            str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        )
        found[str(path.relative_to(directory))] = (path.lstat().st_mtime_ns, contents)
    return found


# --- files of the user's --------------------------------------------------------------------------


def another_models_weights(out: Path) -> str:
    (out / "model-other-7b.safetensors").write_text("mine", encoding="utf-8")
    return "model-other-7b.safetensors"


def a_model_without_facts(out: Path) -> str:
    (out / "model.safetensors").write_text("mine", encoding="utf-8")
    return "model.safetensors"


def a_readme(out: Path) -> str:
    (out / "README.md").write_text("# My notes", encoding="utf-8")
    return "README.md"


def a_list_of_other_files(out: Path) -> str:
    (out / "model.safetensors").write_text("mine", encoding="utf-8")
    sha = "c78b7d3ff29a3a36a8ab5bd3a0f7b1e5bc1d0c8c2a6a4c4e3b0a3f9c8d7e6f5a"
    (out / SUMS).write_text(f"{sha}  model.safetensors\n", encoding="utf-8")
    return SUMS


def a_link_to_elsewhere(out: Path) -> str:
    elsewhere = out.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    (elsewhere / "weights").write_text("mine", encoding="utf-8")
    (out / "model.safetensors").symlink_to(elsewhere / "weights")
    return "model.safetensors"


def a_folder_of_their_own(out: Path) -> str:
    (out / PARTIAL).mkdir()
    (out / PARTIAL / "chapter-1.txt").write_text("mine", encoding="utf-8")
    return "partial/chapter-1.txt"


def an_export_with_a_changed_card(out: Path) -> str:
    exported(out)
    (out / "README.md").write_text("# Mine now", encoding="utf-8")
    return "README.md"


def an_export_with_trained_weights(out: Path) -> str:
    exported(out)
    (out / "model.safetensors").write_text("trained on", encoding="utf-8")
    return "model.safetensors"


def an_export_beside_other_weights(out: Path) -> str:
    exported(out)
    (out / "model_backup.safetensors").write_text("mine", encoding="utf-8")
    return "model_backup.safetensors"


THEIRS: list[Callable[[Path], str]] = [
    another_models_weights,
    a_model_without_facts,
    a_readme,
    a_list_of_other_files,
    a_link_to_elsewhere,
    a_folder_of_their_own,
    an_export_with_a_changed_card,
    an_export_with_trained_weights,
    an_export_beside_other_weights,
]


@pytest.mark.parametrize("theirs", THEIRS, ids=lambda made: made.__name__)
@pytest.mark.parametrize("way", ["by name", "as .", "through a link", "of a swarm"])
def test_a_file_of_the_users_is_in_the_way_and_stays(
    theirs: Callable[[Path], str], way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "export"
    out.mkdir()
    name = theirs(out)
    before = seen(tmp_path)
    monkeypatch.chdir(out if way == "as ." else tmp_path.parent)
    arguments = {
        "by name": ["export", "--out", str(out), "--join", NOBODY],
        "as .": ["export", "--out", ".", "--join", NOBODY],
        "through a link": [
            "export",
            "--out",
            str(tmp_path.parent / f"{tmp_path.name}-link"),
            "--join",
            NOBODY,
        ],
        "of a swarm": ["swarm", "--state-dir", str(tmp_path), "--summary", str(tmp_path.parent / "s.json")],
    }[way]
    if way == "through a link":
        Path(arguments[2]).symlink_to(out)
    result = CliRunner().invoke(app, arguments)
    told = " ".join(result.output.split())
    assert result.exit_code == 2, told
    assert name in told
    assert told.endswith("--state-dir." if way == "of a swarm" else "--out.")
    assert seen(tmp_path) == before


def test_a_file_where_the_folder_should_be_stays(tmp_path: Path) -> None:
    (tmp_path / "export").write_text("mine", encoding="utf-8")
    before = seen(tmp_path)
    for arguments in (["export", "--out", str(tmp_path / "export")], ["swarm", "--state-dir", str(tmp_path)]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2, result.output
        assert seen(tmp_path) == before


def test_what_exports_do_not_write_stays_beside_them(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    (tmp_path / ".gitattributes").write_text("mine", encoding="utf-8")
    exported(tmp_path)
    (tmp_path / SUMS).write_text(
        (tmp_path / SUMS).read_text(encoding="utf-8") + f"{'0' * 64}  notes.txt\n", encoding="utf-8"
    )
    exported(tmp_path, "2")
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"
    assert (tmp_path / ".gitattributes").read_text(encoding="utf-8") == "mine"


def test_a_file_that_comes_in_the_way_later_stays(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "README.md").write_text("mine", encoding="utf-8")
    before = seen(tmp_path)
    with pytest.raises(StateError, match=r"README\.md"):
        put_in_place(tmp_path)
    assert seen(tmp_path) == before


def test_a_summary_that_nobody_named_replaces_only_a_summary(
    tmp_path: Path,
) -> None:
    (tmp_path / "summary.json").write_text('{"chapters": 3}', encoding="utf-8")
    result = CliRunner().invoke(app, ["swarm", "--state-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "is not the summary of a swarm" in " ".join(result.output.split())
    assert (tmp_path / "summary.json").read_text(encoding="utf-8") == '{"chapters": 3}'


# --- stopped in the middle ------------------------------------------------------------------------


class Stopped(BaseException):
    """The process ends here."""


class StopAfter:
    """Stops at the one that comes after so many changes of names."""

    def __init__(self, changes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = changes
        for name in ("rename", "replace", "unlink", "rmdir", "mkdir"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, change: Callable[..., None]) -> Callable[..., None]:
        def counted(*arguments: object, **named: object) -> None:
            self.left -= 1
            if self.left < 0:
                raise Stopped
            change(*arguments, **named)

        return counted


@pytest.mark.parametrize("former", [0, 1, 3], ids=["into a new folder", "over one file", "over three shards"])
def test_an_export_that_was_stopped_anywhere_goes_on(
    former: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = tmp_path / "reference"
    exported(reference, "2", shards=2)
    wanted = {name: contents for name, (_, contents) in seen(reference).items()}
    stops = 0
    while True:
        out = tmp_path / f"out-{stops}"
        if former:
            exported(out, "1", shards=former)
        with monkeypatch.context() as patched:
            StopAfter(stops, patched)
            try:
                exported(out, "2", shards=2)
                break
            except Stopped:
                pass
        require_free(out)  # nothing of its own is in the way
        if (out / "config.json").exists():  # then it is a whole one
            for line in (out / SUMS).read_text(encoding="utf-8").splitlines():
                assert (out / line.split("  ")[1]).exists(), (stops, line)
        put_in_place(out)
        exported(out, "2", shards=2)
        assert {name: contents for name, (_, contents) in seen(out).items()} == wanted, stops
        stops += 1
    assert stops > 10
