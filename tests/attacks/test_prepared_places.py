"""Another user of the machine has been at a place before: a sentence refuses it, and none of its links is followed.

Three users: root, who runs the test; the victim; and the attacker. Folders are not sticky where the attack allows it,
since the kernel itself follows no link of another user's in a sticky one (fs.protected_symlinks).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bootstrap.display import require_places, write_whole
from bootstrap.export.order import ExportOrder, check_order
from node.data.documents import Split, stored_documents
from node.storage.state_directory import StateDirectory
from node.watch.events import JsonLines
from node.watch.trace import TraceFile
from protocol.errors import StateError, UserError
from protocol.files.keeping import one_after_another, own, replace_whole
from protocol.records.identity import Identity

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")

VICTIM, ATTACKER = 4002, 4001


@contextmanager
def user(number: int) -> Iterator[None]:
    """Do the block as this user, of no group but the one of the same number."""
    groups, umask = os.getgroups(), os.umask(0o022)
    os.setgroups([])
    os.setegid(number)
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
        os.umask(umask)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for all, with the victim's home in it."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o1777)
    home = place / "home"
    home.mkdir()
    os.chown(home, VICTIM, VICTIM)
    with user(VICTIM):
        (home / "diary").write_text("precious", encoding="utf-8")
        (home / ".bashrc").write_text("export A=1", encoding="utf-8")
        (home / "diary").chmod(0o600)
    yield place
    shutil.rmtree(place)


def seen(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        path.name: (path.stat().st_mtime_ns, path.stat().st_mode, path.read_bytes())
        for path in directory.iterdir()
    }


def folder_of(number: int, path: Path, mode: int = 0o777) -> Path:
    path.mkdir()
    path.chmod(mode)
    os.chown(path, number, number)
    return path


def links_in(state: Path, home: Path) -> None:
    (state / "lock").symlink_to(home / "diary")
    (state / "node.json.new").symlink_to(home / ".bashrc")
    (state / "node.log").symlink_to(home / ".bashrc")


def test_a_state_directory_that_another_user_made_is_refused(scratch: Path) -> None:
    state, home = folder_of(ATTACKER, scratch / "state"), scratch / "home"
    with user(ATTACKER):
        links_in(state, home)
    before = seen(home)
    with user(VICTIM), pytest.raises(StateError) as told:
        StateDirectory(state).open()
    assert str(told.value) == (
        f"Cannot use the directory {state} (it belongs to user {ATTACKER}, who can change what is in it). "
        "Choose another with --state-dir."
    )
    assert seen(home) == before
    with pytest.raises(StateError, match="it belongs to user 4001"):  # root is nobody's victim, either
        StateDirectory(state).open()
    assert seen(home) == before


@pytest.mark.parametrize("name", ["lock", "identity.key", "node.json", "token", "events.jsonl"])
@pytest.mark.parametrize("what", ["a link", "a file"])
def test_what_another_user_put_into_an_open_directory_is_refused(name: str, what: str, scratch: Path) -> None:
    state, home = folder_of(VICTIM, scratch / "state"), scratch / "home"
    with user(ATTACKER):
        if what == "a link":
            (state / name).symlink_to(home / "diary")
        else:
            (state / name).write_bytes(b"chosen by the attacker")
    before = seen(home)
    with (
        user(VICTIM),
        pytest.raises(StateError, match=rf"{name} in it belongs to user {ATTACKER}.*--state-dir"),
    ):
        StateDirectory(state).open()
    assert seen(home) == before


@pytest.mark.parametrize("is_private", [True, False])
def test_a_directory_for_all_is_refused(is_private: bool, scratch: Path) -> None:
    with (
        user(VICTIM),
        pytest.raises(StateError, match=r"every user of this machine can change.*--state-dir\.$"),
    ):
        own(folder_of_root(scratch / "shared"), "--state-dir", is_private=is_private)
    with user(VICTIM):
        own(scratch / "of the victim's", "--state-dir", is_private=is_private).release()


def folder_of_root(path: Path) -> Path:
    os.seteuid(0)
    try:
        return folder_of(0, path)
    finally:
        os.seteuid(VICTIM)


def test_a_link_to_the_directory_is_refused_unless_it_is_this_users(scratch: Path) -> None:
    open_to_all, home = folder_of(0, scratch / "open"), scratch / "home"
    with user(ATTACKER):
        (open_to_all / "state").symlink_to(home)
        (open_to_all / "above").symlink_to(scratch)
    before = home.stat().st_mode, seen(home)
    for path in (open_to_all / "state", open_to_all / "above" / "new"):
        with (
            user(VICTIM),
            pytest.raises(StateError, match=f"is a link that user {ATTACKER} made.*--state-dir"),
        ):
            StateDirectory(path).open()
    assert (home.stat().st_mode, seen(home)) == before
    with user(VICTIM):
        (home / "big-disk").mkdir()
        (home / "state").symlink_to(home / "big-disk")
        state = StateDirectory(home / "state")
        state.open()
        state.remember(port=4001)
        state.close()


def locked(path: Path) -> None:
    with one_after_another(path):
        pass


def prepared(cache: Path) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as text:
        text.write("A text.")
        text.flush()
        stored_documents([text.name], "text", 4096, Split(0.5), cache)


WRITES: dict[str, Callable[[Path], object]] = {
    "a file written whole": lambda path: write_whole(path, "new", "Choose another file."),
    "the check before": lambda path: require_places(path, advice="Choose another file."),
    "a key": lambda path: Identity.load_or_create(path),
    "a trace": TraceFile,
    "events": JsonLines,
    "a lock": locked,
    "documents": prepared,
    "an export": lambda path: check_order(ExportOrder(path)),
}


@pytest.mark.parametrize("what", WRITES)
@pytest.mark.parametrize("is_there", [True, False], ids=["to a file", "to nothing"])
def test_no_output_goes_where_another_users_link_leads(what: str, is_there: bool, scratch: Path) -> None:
    open_to_all, home = folder_of(0, scratch / "open"), scratch / "home"
    with user(ATTACKER):
        (open_to_all / "out").symlink_to(home / ("diary" if is_there else "new"))
    before = seen(home)
    with user(VICTIM), pytest.raises((UserError, PermissionError)) as told:
        WRITES[what](open_to_all / "out")
    assert "link" in str(told.value) or what == "an export"
    assert seen(home) == before
    assert [path.name for path in open_to_all.iterdir()] == ["out"]


def test_a_foreseen_name_of_the_file_beside_leads_nowhere(scratch: Path) -> None:
    open_to_all, home = folder_of(0, scratch / "open"), scratch / "home"
    with user(ATTACKER):
        (open_to_all / "summary.json.new").symlink_to(home / "diary")
    before = seen(home)
    with user(VICTIM):
        replace_whole(open_to_all / "summary.json", b"{}")
    assert seen(home) == before
    assert (open_to_all / "summary.json").read_bytes() == b"{}"


def test_a_key_of_another_users_is_not_taken_for_this_ones(scratch: Path) -> None:
    open_to_all = folder_of(0, scratch / "open")
    with user(ATTACKER):
        Identity.from_seed("attacker").save(open_to_all / "run.key")
        (open_to_all / "run.key").chmod(0o644)
    with user(VICTIM), pytest.raises(StateError, match=rf"run\.key \(it belongs to user {ATTACKER}\)"):
        Identity.load(open_to_all / "run.key")


def test_root_works_in_the_folder_of_a_user_but_keeps_no_secrets_there(scratch: Path) -> None:
    """As in a container whose volume belongs to a user of the host."""
    volume = folder_of(VICTIM, scratch / "volume", 0o755)
    own(volume, "--state-dir").release()
    write_whole(volume / "summary.json", "{}", "Choose another file.")
    check_order(ExportOrder(volume / "model"))
    with user(VICTIM):
        Identity.from_seed("owner").save(volume / "run.key")
    assert Identity.load(volume / "run.key").peer_id == Identity.from_seed("owner").peer_id
    with pytest.raises(StateError, match=rf"belongs to user {VICTIM}.*--state-dir"):
        StateDirectory(volume).open()
