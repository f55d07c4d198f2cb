"""The file beside the one that is written: nobody foresees its name, and what a killed process left goes."""

from __future__ import annotations

import fcntl
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bootstrap.creating.choosing import kept_tokenizer, with_tokenizer
from node.storage.state_directory import StateDirectory
from protocol.errors import StateError
from protocol.files.keeping import descriptor_of, one_after_another, own, replace_whole, require_writable
from tests.swarm.micro import micro_manifest
from tests.unit.tokenizers_made_here import bpe

LEFT = "file.0123456789abcdef.new"


def test_what_a_killed_process_left_goes_and_what_is_written_stays(tmp_path: Path) -> None:
    (tmp_path / LEFT).write_bytes(b"half")
    with (tmp_path / "file.fedcba9876543210.new").open("wb") as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        replace_whole(tmp_path / "file", b"whole")
        assert {path.name for path in tmp_path.iterdir()} == {"file", "file.fedcba9876543210.new"}
    replace_whole(tmp_path / "file", b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_files_of_the_users_beside_stay(tmp_path: Path) -> None:
    mine = ["file.new", "file.backup.new", "other.0123456789abcdef.new", "file.0123456789ABCDEF.new"]
    for name in mine:
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / LEFT).symlink_to(tmp_path / "file.new")
    replace_whole(tmp_path / "file", b"whole")
    require_writable(tmp_path / "file")
    assert {path.name for path in tmp_path.iterdir()} == {"file", LEFT, *mine}
    assert all((tmp_path / name).read_bytes() == b"mine" for name in mine)


def test_many_that_write_one_file_each_write_it_whole(tmp_path: Path) -> None:
    contents = [bytes([number]) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: replace_whole(tmp_path / "file", one), contents * 8))
    assert (tmp_path / "file").read_bytes() in contents
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_rename_is_brought_to_the_disk_after_the_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        flushed.append(f"folder {(tmp_path / 'file').exists()}" if is_folder else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    replace_whole(tmp_path / "file", b"whole")
    assert flushed == ["file", "folder True"]


def test_a_name_as_long_as_a_name_may_be_is_written(tmp_path: Path) -> None:
    replace_whole(tmp_path / ("n" * 255), b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["n" * 255]


def test_a_lock_follows_no_link_and_changes_no_file(tmp_path: Path) -> None:
    (tmp_path / "diary").write_bytes(b"precious")
    (tmp_path / "lock").symlink_to(tmp_path / "diary")
    with pytest.raises(StateError, match=r"lock in it is a link\)\. Choose another with --state-dir\."):
        own(tmp_path, "--state-dir")
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").write_bytes(b"mine")
    with own(tmp_path, "--state-dir"), one_after_another(tmp_path / "diary"):
        pass
    assert (tmp_path / "lock").read_bytes() == b"mine"
    assert (tmp_path / "diary").read_bytes() == b"precious"


def test_a_file_that_grows_goes_on_or_begins_again(tmp_path: Path) -> None:
    for contents, is_fresh in ((b"one", False), (b"two", False), (b"three", True)):
        with os.fdopen(descriptor_of(tmp_path / "file", is_fresh=is_fresh), "ab") as file:
            file.write(contents)
        assert (tmp_path / "file").read_bytes() == {b"one": b"one", b"two": b"onetwo"}.get(contents, contents)


# --- names that a user may have given to other files ----------------------------------------------


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.hashes", "token", "node.json", "events.jsonl"])
def test_a_state_directory_with_a_file_of_the_users_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "notes.txt").write_bytes(b"mine")
    with pytest.raises(StateError, match=f"it has a {name} that this program has not written.*--state-dir"):
        StateDirectory(tmp_path).open()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        name: b"mine",
        "notes.txt": b"mine",
    }
    (tmp_path / name).unlink()
    node = StateDirectory(tmp_path)
    node.open()
    node.save_tokenizer(b"the run's")
    node.close()
    node.open()
    node.close()


def test_a_copied_state_directory_without_its_lock_is_taken_up(tmp_path: Path) -> None:
    node = StateDirectory(tmp_path / "node")
    node.open()
    node.identity()
    node.remember(port=4001)
    node.close()
    (tmp_path / "node" / "lock").unlink()
    node.open()
    assert node.facts() == {"port": 4001}
    node.close()


def test_a_new_run_replaces_no_tokenizer_that_lies_in_its_directory(tmp_path: Path) -> None:
    raw = bpe()
    manifest = with_tokenizer(micro_manifest(model__vocab_size=300), raw)
    (tmp_path / "tokenizer.json").write_bytes(b"mine")
    with pytest.raises(StateError, match="another tokenizer than the new run's"):
        kept_tokenizer(tmp_path, manifest, raw, is_new=True)
    assert (tmp_path / "tokenizer.json").read_bytes() == b"mine"
    kept_tokenizer(tmp_path, manifest, raw)  # mends the damaged file of a run that is there
    assert (tmp_path / "tokenizer.json").read_bytes() == raw
