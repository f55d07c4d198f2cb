"""Every file that is kept: written whole or not at all, and wherever it was cut, that is found and told."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bootstrap.creating.inviting import Issuer, revoked_with, write_delegate
from bootstrap.creating.run import (
    MANIFEST,
    REVOKED,
    RUN_KEY,
    SEED_CREDENTIAL,
    SEED_KEY,
    found,
    revocations_in,
)
from bootstrap.found_cli import app
from node.data.documents import Split, stored_documents
from node.giving.ledger import ContributionLedger
from node.process.entering import kept_revocations
from node.storage.checkpoint_files import Checkpoint
from node.storage.stage_state import StageState
from node.storage.state_directory import StateDirectory
from node.watch.health import SOCKET_FILE, Unwell, look
from protocol.access.revocations import Revocations, mark_of
from protocol.errors import StateError, UserError
from protocol.files.keeping import Lock, create_whole, own, replace_whole
from protocol.records.identity import Identity
from protocol.run.manifest import Manifest
from protocol.run.signed_manifest import SignedManifest
from tests.swarm.micro import micro_manifest
from tests.unit.tokenizers_made_here import bpe

SMALL = 600  # bytes: cut at every one of them; larger files at so many places
MADE_UP = Identity.from_seed("someone").peer_id
OWNER = Identity.from_seed("owner")


def private_run() -> Manifest:
    from bootstrap.creating.choosing import with_tokenizer

    return with_tokenizer(micro_manifest(model__vocab_size=300, access__private=True), bpe())


def take_up(directory: Path) -> object:
    """What the run's owner starts again; the same whenever nothing is damaged."""
    founded = found(directory, None)
    return (
        founded.signed.run_id,
        founded.peer_id,
        founded.tokenizer,
        founded.hashes,
        len(founded.credential) > 0,
    )


def state_of(directory: Path) -> StateDirectory:
    return StateDirectory(directory)


@dataclass(frozen=True)
class Kept:
    """`make` fills a directory with the file; `read` is what its owner does with it: the same, if all is well."""

    file: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]
    is_made_again: bool = False  # then damage is told in the log, and not the end

    def __str__(self) -> str:
        return self.file


def run_directory(directory: Path) -> None:
    found(directory, private_run(), bpe())
    revoked_with(directory, [MADE_UP])


def node_directory(directory: Path) -> None:
    state = state_of(directory)
    directory.mkdir()
    state.identity()
    state.save_manifest(SignedManifest.sign(micro_manifest(), OWNER))
    found(directory / "run", private_run(), bpe())
    state.save_token(Issuer.owner(directory / "run").invite(1, 1.0).to_text())
    state.revoked(Revocations(1.0, frozenset()).sign(signed().run_id, OWNER))
    state.remember(port=4001, stage=1)
    state.save_peer_book(["/ip4/192.0.2.1/tcp/1"])
    state.save_given(7)
    ledger = ContributionLedger()
    ledger.note_tokens(MADE_UP, 100)
    state.save_ledger(ledger.as_json())
    tensors = torch.arange(5 * 64, dtype=torch.float32).reshape(5, 64).unbind()
    state.save_checkpoint("run", Checkpoint(1, StageState(7, 3, 2, 6, *(one.clone() for one in tensors))))


def signed() -> SignedManifest:
    return SignedManifest.sign(micro_manifest(), OWNER)


def step_of(directory: Path) -> int:
    checkpoint = state_of(directory).checkpoint("run")
    assert checkpoint is not None
    return checkpoint.state.step


def store(directory: Path) -> tuple[str, list[str]]:
    documents = stored_documents(
        [str(directory / "texts" / "*.txt")], "text", 4096, Split(0.5), directory / "cache"
    )
    return documents.identity, sorted([*documents.held_out(), *documents.training((1,), 0, 0)])


def store_directory(directory: Path) -> None:
    (directory / "texts").mkdir(parents=True)
    for number in range(4):
        (directory / "texts" / f"{number}.txt").write_text(f"A text, number {number}.", encoding="utf-8")
    store(directory)
    [name] = [path for path in (directory / "cache").iterdir() if path.is_dir()]
    (directory / "store").symlink_to(name)


def socket_directory(directory: Path) -> None:
    directory.mkdir()
    (directory / SOCKET_FILE).write_text("/tmp/noloco-health-nobody/socket", encoding="utf-8")


def delegate_file(directory: Path) -> None:
    run_directory(directory)
    write_delegate(directory, directory / "friend.delegate", 1.0)


KEPT = [
    Kept(RUN_KEY, run_directory, lambda d: Issuer.owner(d).key.public_key),
    Kept(SEED_KEY, run_directory, take_up),
    Kept(MANIFEST, run_directory, take_up),
    Kept("tokenizer.json", run_directory, take_up),
    Kept("tokenizer.hashes", run_directory, take_up, is_made_again=True),
    Kept(SEED_CREDENTIAL, run_directory, take_up, is_made_again=True),
    Kept(REVOKED, run_directory, take_up),
    Kept("friend.delegate", delegate_file, lambda d: Issuer.delegate(d / "friend.delegate").key.public_key),
    Kept("identity.key", node_directory, lambda d: state_of(d).identity().peer_id),
    Kept("manifest.noloco", node_directory, lambda d: state_of(d).manifest() and signed().run_id),
    Kept("token", node_directory, lambda d: state_of(d).token()),
    Kept(
        "revoked.noloco",
        node_directory,
        lambda d: kept_revocations(state_of(d), signed()),
        is_made_again=True,
    ),
    Kept("node.json", node_directory, lambda d: state_of(d).facts(), is_made_again=True),
    Kept("peers.json", node_directory, lambda d: state_of(d).peer_book(), is_made_again=True),
    Kept("given.json", node_directory, lambda d: state_of(d).given(), is_made_again=True),
    Kept(
        "contribution.json",
        node_directory,
        lambda d: ContributionLedger.read(state_of(d).ledger_path).had,
        is_made_again=True,
    ),
    Kept("checkpoint-1.safetensors", node_directory, step_of),
    Kept("store/index.bin", store_directory, store, is_made_again=True),
    Kept("store/text.bin", store_directory, store, is_made_again=True),
    Kept("store/store.json", store_directory, store, is_made_again=True),
]


def places(size: int) -> Iterator[int]:
    """Where to cut: everywhere in a small file, at both ends and here and there in a large one."""
    yield from (
        range(size)
        if size <= SMALL
        else sorted({*range(40), *range(0, size, max(1, size // 40)), *range(size - 20, size)})
    )


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: f"{kept.make.__name__}-{kept}")
def test_a_file_that_was_cut_anywhere_is_found_and_told(
    kept: Kept, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    directory = tmp_path / "kept"
    kept.make(directory)
    whole = kept.read(directory)
    contents = (directory / kept.file).read_bytes()
    for place in places(len(contents)):
        (directory / kept.file).write_bytes(contents[:place])
        caplog.clear()
        if kept.is_made_again:
            with caplog.at_level(logging.WARNING):
                again = kept.read(directory)
            assert is_told(caplog.text), f"cut at {place}: {again}"
        else:
            with pytest.raises(UserError) as told:
                kept.read(directory)
            sentence = str(told.value)
            assert kept.file in sentence, f"cut at {place}: {sentence}"
            assert sentence.endswith("."), sentence
            assert "[Errno" not in sentence
    (directory / kept.file).write_bytes(contents)
    assert kept.read(directory) == whole


def is_told(log: str) -> bool:
    return "damaged" in log or "cannot be used" in log


def test_a_place_of_a_socket_that_was_cut_is_no_daemon(tmp_path: Path) -> None:
    socket_directory(tmp_path / "node")
    contents = (tmp_path / "node" / SOCKET_FILE).read_text(encoding="utf-8")
    for place in range(len(contents) + 1):
        (tmp_path / "node" / SOCKET_FILE).write_text(contents[:place], encoding="utf-8")
        with pytest.raises(Unwell):
            look(tmp_path / "node")


def test_a_key_of_which_one_bit_is_another_is_damaged(tmp_path: Path) -> None:
    Identity.load_or_create(tmp_path / "a.key")
    contents = (tmp_path / "a.key").read_bytes()
    for place in range(len(contents)):
        flipped = bytearray(contents)
        flipped[place] ^= 1
        (tmp_path / "a.key").write_bytes(flipped)
        with pytest.raises(StateError, match=r"a\.key is not an Ed25519 key file, or damaged\. Restore it"):
            Identity.load(tmp_path / "a.key")


# --- whole or not at all ------------------------------------------------------------------------


class FullAfter:
    """`os.fsync` on a disk that has room for so many more files."""

    def __init__(self, files: int) -> None:
        self.left = files

    def __call__(self, descriptor: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("files", range(5))
def test_a_disk_that_fills_while_a_run_is_founded_leaves_no_half_file_and_the_next_start_works(
    files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, manifest = tmp_path / "run", private_run()
    monkeypatch.setattr(os, "fsync", FullAfter(files))
    with pytest.raises(StateError, match=r"No space left on device\)\. Free some space\.$"):
        found(directory, manifest, bpe())
    monkeypatch.undo()
    assert not [path.name for path in directory.iterdir() if path.suffix == ".new" or not path.stat().st_size]
    founded = found(directory, manifest, bpe())
    assert founded.is_new
    assert founded.signed.manifest == manifest


def test_a_checkpoint_whose_numbers_are_others_is_damaged(tmp_path: Path) -> None:
    node_directory(tmp_path / "node")
    directory = state_of(tmp_path / "node")
    path = directory.path / "checkpoint-1.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    begin = whole.index(b'"__metadata__"') + len(b'"__metadata__":{')
    end = whole.index(b"}", begin)
    assert end < 8 + length
    assert directory.checkpoint("run") is not None
    for place in range(begin, end):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(StateError, match="is damaged, or of an older version"):
            directory.checkpoint("run")


def test_who_revokes_at_the_same_time_loses_no_entry(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    signed = found(directory, private_run(), bpe()).signed
    peers = [Identity.from_seed("revoked", number) for number in range(24)]
    with ThreadPoolExecutor(len(peers)) as pool:
        list(pool.map(lambda peer: revoked_with(directory, [peer.peer_id]), peers))
    assert revocations_in(directory, signed).entries == {mark_of(peer.public_key) for peer in peers}


def test_what_the_owner_writes_later_is_whole_or_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "run"
    run_directory(directory)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    monkeypatch.setattr(os, "fsync", FullAfter(0))
    with pytest.raises(StateError, match="Free some space"):
        revoked_with(directory, [Identity.from_seed("another").peer_id])
    with pytest.raises(StateError, match="Free some space"):
        write_delegate(directory, directory / "friend.delegate", 1.0)
    init = CliRunner().invoke(app, ["init", str(directory / "run.toml"), "--yes"])
    assert init.exit_code == 2
    assert "Free some space" in init.output
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(descriptor: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "fsync", too_large)
    with pytest.raises(StateError, match=r"ulimit -f"):
        Identity.load_or_create(tmp_path / "a.key")
    assert not list(tmp_path.iterdir())


def test_a_file_is_created_once_and_a_link_goes_on_leading_to_it(tmp_path: Path) -> None:
    create_whole(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        create_whole(tmp_path / "file", b"second")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    replace_whole(tmp_path / "link", b"third")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"third"
    replace_whole(Path("/dev/null"), b"nothing")
    assert Path("/dev/null").is_char_device()


# --- one owner at a time ------------------------------------------------------------------------


def test_a_directory_has_one_owner_whatever_each_is(tmp_path: Path) -> None:
    with own(tmp_path / "run", "--state-dir") as lock:
        assert repr(lock) == f"Lock({tmp_path / 'run' / 'lock'}, held)"
        with pytest.raises(StateError, match="Another node or seed peer runs"):
            StateDirectory(tmp_path / "run").open()
        second = CliRunner().invoke(
            app,
            ["--preset", "tiny", "--state-dir", str(tmp_path / "run"), "--host", "127.0.0.1", "--port", "0"],
        )
        assert second.exit_code == 75, "later: the other one may have ended"
        told = " ".join(second.output.split())
        assert f"Another node or seed peer runs with the directory {tmp_path / 'run'}" in told
        assert told.endswith("Give this one a directory of its own with --state-dir.")
        assert {path.name for path in (tmp_path / "run").iterdir()} == {"lock", "format.json"}
    assert not repr(lock).endswith("held)")
    node = StateDirectory(tmp_path / "run")
    node.open()
    with pytest.raises(BlockingIOError):
        Lock(tmp_path / "run").take()
    node.close()
