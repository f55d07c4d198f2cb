"""`noloco backup`, there and back: keys and small files under a passphrase, and the same directory again."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import msgpack
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from typer.testing import CliRunner, Result

from bootstrap.creating import backup
from bootstrap.creating import run as creating
from bootstrap.creating.run import MANIFEST, found
from bootstrap.tools_cli import app
from node.storage import state_directory
from protocol.errors import StateError
from protocol.files import keeping
from protocol.files.keeping import FORMAT, FORMAT_FILE, OWNED
from protocol.records.identity import Identity

PASSPHRASE = "walnut lamp blue"
NOT_KEPT = {  # made again, or large, or of one day
    "lock", FORMAT_FILE, "words.json", "words-over.json", "events.jsonl", "node.log",
}  # fmt: skip


@pytest.fixture(autouse=True)
def cheap_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "COST", 2**10)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    found(directory, None)
    return directory


def called(command: str, file: Path, directory: Path, passphrase: str = PASSPHRASE) -> Result:
    said = file.with_name("passphrase")
    said.write_text(f"{passphrase}\n", encoding="utf-8")
    options = [] if command == "backup" else ["--restore"]
    arguments = ["backup", file, "--state-dir", directory, "--passphrase-file", said, *options]
    return CliRunner().invoke(app, list(map(str, arguments)))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name not in NOT_KEPT}


def test_a_run_comes_back_as_it_was(run: Path, tmp_path: Path) -> None:
    made = called("backup", tmp_path / "mine", run)
    assert made.exit_code == 0, made.output
    assert "run.key signs invitations" in " ".join(made.output.split())
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o600, "for its owner's eyes alone"
    assert run.joinpath("run.key").read_bytes() not in (tmp_path / "mine").read_bytes()
    answer = called("restore", tmp_path / "mine", tmp_path / "new")
    assert answer.exit_code == 0, answer.output
    assert contents(tmp_path / "new") == contents(run)
    assert (tmp_path / "new" / "run.key").stat().st_mode & 0o077 == 0
    assert found(tmp_path / "new", None).is_new is False


def test_a_node_comes_back_as_the_same_peer(tmp_path: Path) -> None:
    node = tmp_path / "node"
    node.mkdir()
    peer = Identity.load_or_create(node / "identity.key").peer_id
    (node / "checkpoint-0.safetensors").write_bytes(b"large")
    assert called("backup", tmp_path / "mine", node).exit_code == 0
    answer = called("restore", tmp_path / "mine", tmp_path / "new")
    assert "noloco-node --state-dir" in " ".join(answer.output.split())
    assert Identity.load_or_create(tmp_path / "new" / "identity.key").peer_id == peer
    assert not (tmp_path / "new" / "checkpoint-0.safetensors").exists()


def test_every_small_file_of_a_directory_is_kept_or_left_out_on_purpose() -> None:
    named = OWNED | state_directory.WRITTEN | creating.WRITTEN
    assert named - set(backup.KEPT) <= NOT_KEPT


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda raw: raw[:-1], "does not open"),
        (lambda raw: raw[:30], "does not open"),
        (lambda raw: raw[:-5] + b"\0\0\0\0\0", "does not open"),
        (lambda raw: b"", "is no backup"),
        (lambda raw: b"PK" + raw, "is no backup"),
        (lambda raw: raw.replace(b" %d\n" % FORMAT, b" %d\n" % (FORMAT + 1), 1), "of a later version"),
        (lambda raw: raw.replace(b" %d\n" % FORMAT, b" %d\n" % (FORMAT - 1), 1), "does not open"),
    ],
)
def test_what_is_no_whole_backup_restores_nothing(spoil: Any, says: str, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine"
    called("backup", file, run)
    file.write_bytes(spoil(file.read_bytes()))
    answer = called("restore", file, tmp_path / "new")
    assert answer.exit_code == 2
    assert says in " ".join(answer.output.split())
    assert not (tmp_path / "new").exists()


def test_another_passphrase_opens_nothing_and_a_short_one_is_refused(run: Path, tmp_path: Path) -> None:
    called("backup", tmp_path / "mine", run)
    answer = called("restore", tmp_path / "mine", tmp_path / "new", "walnut lamp green")
    assert answer.exit_code == 2
    assert "the passphrase is another one" in " ".join(answer.output.split())
    short = called("backup", tmp_path / "other", run, "short")
    assert short.exit_code == 2
    assert "at least 8 characters" in " ".join(short.output.split())
    assert not (tmp_path / "other").exists()


def test_nothing_that_is_there_is_replaced(run: Path, tmp_path: Path) -> None:
    called("backup", tmp_path / "mine", run)
    before = contents(run)
    assert "exists already" in " ".join(called("backup", tmp_path / "mine", run).output.split())
    other = tmp_path / "other"
    other.mkdir()
    (other / "seed.key").write_bytes(b"another seed peer's")
    answer = called("restore", tmp_path / "mine", other)
    assert answer.exit_code == 2
    assert "has a seed.key already" in " ".join(answer.output.split())
    assert contents(other) == {"seed.key": b"another seed peer's"}
    assert contents(run) == before


def test_a_full_disk_leaves_nothing_behind(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called("backup", tmp_path / "mine", run)
    create = keeping.create_whole

    def full(path: Path, *parts: bytes) -> None:
        if path.name == MANIFEST:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        create(path, *parts)

    monkeypatch.setattr(backup, "create_whole", full)
    answer = called("restore", tmp_path / "mine", tmp_path / "new")
    assert answer.exit_code == 2
    assert "Free some space" in " ".join(answer.output.split())
    assert contents(tmp_path / "new") == {}


def test_an_interrupted_restore_can_be_repeated(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called("backup", tmp_path / "mine", run)
    create = keeping.create_whole

    def interrupted(path: Path, *parts: bytes) -> None:
        if path.name == MANIFEST:
            raise KeyboardInterrupt
        create(path, *parts)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(backup, "create_whole", interrupted)
        called("restore", tmp_path / "mine", tmp_path / "new")
    assert contents(tmp_path / "new") == {}
    assert called("restore", tmp_path / "mine", tmp_path / "new").exit_code == 0
    assert contents(tmp_path / "new") == contents(run)


def test_a_folder_that_cannot_be_looked_into_costs_a_sentence(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called("backup", tmp_path / "mine", run)
    there = backup.opened(tmp_path / "mine", PASSPHRASE)

    def closed(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "exists", closed)
    with pytest.raises(StateError, match="Choose another --state-dir"):
        backup.restore(there, tmp_path / "new")


@pytest.mark.parametrize("inside", [[1], {"seed.key": "text"}, {"seed.key": 1}, {MANIFEST: None}])
def test_a_backup_that_somebody_else_made_of_anything_does_not_open(inside: Any, tmp_path: Path) -> None:
    beginning = b"noloco backup %d\n" % FORMAT
    salt, nonce = bytes(backup.SALT_BYTES), bytes(backup.NONCE_BYTES)
    secret = AESGCM(backup._key(PASSPHRASE, salt)).encrypt(nonce, msgpack.packb(inside), beginning)
    (tmp_path / "mine").write_bytes(beginning + salt + nonce + secret)
    with pytest.raises(StateError, match="does not open"):
        backup.opened(tmp_path / "mine", PASSPHRASE)


def test_a_backup_that_could_not_be_opened_is_not_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup, "MOST_BYTES", 100)
    answer = called("backup", tmp_path / "mine", run)
    assert answer.exit_code == 2
    assert "too large for a backup" in " ".join(answer.output.split())
    assert not (tmp_path / "mine").exists()


def test_a_directory_without_keys_is_no_run(tmp_path: Path) -> None:
    answer = called("backup", tmp_path / "mine", tmp_path)
    assert answer.exit_code == 2
    assert "has no keys of a run or a node" in " ".join(answer.output.split())
