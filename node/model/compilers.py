"""What torch's compiler needs of this machine: a compiler, for a GPU Python's headers, and a place for what it makes.

For a processor torch writes C++. For a GPU Triton makes the kernels, and has a small C extension compiled that hands
them to the driver.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

CPP_COMPILERS = ("g++", "clang++")
C_COMPILERS = ("gcc", "clang", "cc")  # that Triton looks for, where CC names none
CACHE = "TORCHINDUCTOR_CACHE_DIR"
TRITON_CACHE = "TRITON_CACHE_DIR"
PACKAGES = "apt-get install gcc g++ python3-dev"


def compiler_missing(device_type: str) -> str:
    """Return what is missing here for compiling, with the command that mends it, as a sentence; '' if nothing is."""
    if device_type == "cpu":
        mend = "There is no C++ compiler here. Install one (Debian: apt-get install g++)."
        return "" if has_cpp_compiler() else mend
    missing = [] if _is_there(os.environ.get("CC"), C_COMPILERS) else ["C compiler"]
    missing += [] if has_headers() else ["Python.h"]
    if missing:
        return f"There is no {' and no '.join(missing)} here. Install what is missing (Debian: {PACKAGES})."
    folder = cache_folder()
    if not can_hold_code(folder):
        return f"Compiled code cannot be kept in {folder}. Set {CACHE} and {TRITON_CACHE} to a folder where it can."
    return ""


def has_cpp_compiler() -> bool:
    return _is_there(os.environ.get("CXX"), CPP_COMPILERS)


def has_headers() -> bool:
    """Return whether Python.h is where Triton looks for it."""
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's, whose headers are elsewhere; Triton does the same
        scheme = "posix_prefix"
    return Path(sysconfig.get_paths(scheme=scheme)["include"], "Python.h").is_file()


def cache_folder() -> Path:
    """The folder in which torch keeps compiled code."""
    return Path(os.environ.get(CACHE) or Path(tempfile.gettempdir(), "torchinductor"))


def can_hold_code(folder: Path) -> bool:
    """Return whether code can be written to this folder, which may not exist yet, and loaded from it."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    is_writable = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    return is_writable and not os.statvfs(place).f_flag & getattr(os, "ST_NOEXEC", 0)


def keep_compiled_in(folder: Path) -> None:
    """Have compiled code kept in this folder, unless the environment names another."""
    os.environ.setdefault(CACHE, str(folder))
    os.environ.setdefault(TRITON_CACHE, str(Path(os.environ[CACHE], "triton")))


def _is_there(named: str | None, usual: tuple[str, ...]) -> bool:
    return any(shutil.which(name) for name in ((named,) if named else usual))
