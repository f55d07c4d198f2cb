"""Sockets, temporary files and caches: where they are put, by whatever a login, a service or a container leaves."""

from __future__ import annotations

import ast
import os
import tempfile
from pathlib import Path

import pytest

from protocol.errors import ResourceError
from protocol.files import folders
from protocol.files.folders import (
    CACHES,
    LONGEST_FOR_SOCKETS,
    folder_for_sockets,
    folders_of_others,
    settle_caches,
    settle_temporary_files,
    short_temporary_folder,
    socket_folders,
    temporary_folder,
    temporary_folders,
    user_name,
)

ROOT = Path(folders.__file__).parent.parent
NAMELESS = 3_133_700


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """No variable of a login or a service is set, and Python has not yet looked for a folder."""
    for name in (*folders.OF_TEMPORARY_FILES, *folders.OF_A_SERVICE, *CACHES, "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    return monkeypatch


def test_the_service_comes_first_for_sockets_and_last_for_files(elsewhere: pytest.MonkeyPatch) -> None:
    elsewhere.setenv("TMPDIR", "/t")
    elsewhere.setenv("RUNTIME_DIRECTORY", "/run/noloco-node:/run/other")
    elsewhere.setenv("XDG_RUNTIME_DIR", "/run/user/5")
    elsewhere.setenv("STATE_DIRECTORY", "/var/lib/noloco-node")
    files = ["/t", "/tmp", "/var/tmp", "/run/user/5", "/run/noloco-node", "/var/lib/noloco-node"]
    assert [str(place) for place in temporary_folders(os.environ)] == files
    assert [str(place) for place in socket_folders()] == [files[4], *files[:4], files[5]]
    assert set(socket_folders()) <= set(folders_of_others())


def test_a_socket_gets_a_path_that_fits(elsewhere: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    elsewhere.setenv("TMPDIR", str(long))
    made = folder_for_sockets("noloco-4194304-f0000000-")
    try:
        assert made.stat().st_mode & 0o777 == 0o700
        assert len(str(made / "p2pclient-aaaaaaaaaaa.sock")) < 108
    finally:
        made.rmdir()
    assert tempfile.gettempdir() == str(long)
    with short_temporary_folder():
        assert len(tempfile.gettempdir()) <= LONGEST_FOR_SOCKETS
    assert tempfile.gettempdir() == str(long)
    with temporary_folder("noloco-test-") as place:
        assert place.parent == long  # what may be large is where the user says
    assert not place.exists()


def refuse(elsewhere: pytest.MonkeyPatch, *writable: Path) -> None:
    """Have nothing be writable but these folders, as under ProtectSystem=strict; root writes anywhere else."""
    make, probe = tempfile.mkdtemp, tempfile.TemporaryFile

    def mkdtemp(prefix: str, dir: Path | None = None) -> str:
        if dir not in writable:
            raise OSError(30, "Read-only file system")
        return make(prefix=prefix, dir=dir)

    def temporary_file(dir: Path) -> object:
        if dir not in writable:
            raise OSError(30, "Read-only file system")
        return probe(dir=dir)

    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    elsewhere.setattr(tempfile, "mkdtemp", mkdtemp)
    elsewhere.setattr(tempfile, "TemporaryFile", temporary_file)
    elsewhere.setattr(tempfile, "gettempdir", none)


def test_where_only_the_service_has_a_folder_libraries_get_it(
    elsewhere: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment = {"STATE_DIRECTORY": str(tmp_path), "TMPDIR": "/nowhere"}
    refuse(elsewhere, tmp_path)
    settle_temporary_files(environment)
    assert environment["TMPDIR"] == tempfile.tempdir == str(tmp_path)


def test_where_nothing_can_be_written_one_sentence_says_what_to_set(elsewhere: pytest.MonkeyPatch) -> None:
    refuse(elsewhere)
    with pytest.raises(
        ResourceError, match=r"no folder for temporary files: none of /tmp, /var/tmp .* Set TMPDIR"
    ):
        settle_temporary_files({})
    with pytest.raises(ResourceError, match=r"folder for sockets: .* TMPDIR .* 46 characters at most\.$"):
        folder_for_sockets("noloco-")
    with pytest.raises(ResourceError, match="folder for temporary files"), temporary_folder("noloco-"):
        pass


def test_caches_go_to_the_service_or_for_want_of_a_home_to_the_node(
    elsewhere: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def settled(otherwise: Path | None = None, **environment: str) -> dict[str, str]:
        before = dict(environment)
        settle_caches(environment, otherwise)
        return {name: value for name, value in environment.items() if name not in before}

    assert not settled(tmp_path / "state", HOME=str(tmp_path))
    assert settled(HOME=str(tmp_path), CACHE_DIRECTORY="/c:/d") == {
        name: str(Path("/c") / folder) for name, folder in CACHES.items()
    }
    elsewhere.setattr(os, "getuid", lambda: NAMELESS)
    assert not settled()  # a tool has no other place
    assert settled(tmp_path)["HF_HOME"] == str(tmp_path / "huggingface")
    assert settled(tmp_path, HOME="/nonexistent")["NUMBA_CACHE_DIR"] == str(tmp_path / "numba")
    assert settled(STATE_DIRECTORY="/s")["TRITON_CACHE_DIR"] == "/s/cache/triton"
    assert not settled(tmp_path, XDG_CACHE_HOME="/x")
    assert "HF_HOME" not in settled(tmp_path, HF_HOME="/mine")
    assert user_name() == str(NAMELESS)


def test_all_that_is_written_beside_goes_through_one_file() -> None:
    """No other file of ours asks for temporary files, names their folders, or expands a home by itself."""
    allowed = {"protocol/files/folders.py", "node/machine/home.py"}
    for path in [
        path for folder in ("protocol", "node", "bootstrap") for path in (ROOT / folder).rglob("*.py")
    ]:
        name = path.relative_to(ROOT).as_posix()
        if name in allowed:
            continue
        for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(part, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in part.names] + [getattr(part, "module", "") or ""]
                assert not {"tempfile", "getpass"} & set(names), name
            elif isinstance(part, ast.Attribute):
                assert part.attr not in ("expanduser", "getuser"), name
                assert ast.unparse(part) != "Path.home", name
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                assert not part.value.startswith(("/tmp", "/var/tmp", "/run/")), f"{name}: {part.value}"
