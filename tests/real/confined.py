"""What a shipped file confines a process to, read from the file: mounts, user and environment, without its manager.

`python confined.py JSON COMMAND…` becomes that command in a mount namespace of its own; it needs root and Linux. The
process keeps its number, so that a test signals it as any other.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

NEW_MOUNTS = 0x20000  # sched.h, CLONE_NEWNS
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 32, 4096, 16384, 1 << 18  # sys/mount.h
NO_NEW_PRIVILEGES = 38  # linux/prctl.h
NAMELESS = 31_337  # a user without a name
ROOT = "/mnt"  # which every Linux has, for the root folder while it is made
KERNEL = ("/proc", "/sys", "/dev")  # which ProtectSystem=strict and read-only containers leave
BIN = Path(sys.prefix) / "bin"
NEEDED = [
    sys.base_prefix,
    sys.prefix,
    str(Path(__file__).parents[2]),
]  # what is installed lies elsewhere there


@dataclass(frozen=True)
class Confinement:
    """What a process may reach: folders of a test as its own, empty ones that all share, and no others."""

    user: int
    environment: dict[str, str]
    own: dict[str, str] = field(default_factory=dict)  # by the place where the process sees them
    shared: list[str] = field(default_factory=list)  # as /tmp is
    hidden: list[str] = field(default_factory=list)
    folder: str = "/"

    def prefix(self) -> tuple[str, ...]:
        """What to put before a command."""
        return sys.executable, __file__, json.dumps(asdict(self))


def why_unavailable() -> str:
    return "" if sys.platform == "linux" and os.geteuid() == 0 else "needs root, to mount what is read-only"


def folder_of(user: int, place: Path) -> str:
    """Make a folder for that user alone."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chown(place, user, user)
    return str(place)


def confined_by_unit(unit: Path, file: Mapping[str, str], places: Path) -> tuple[Confinement, list[str]]:
    """What systemd.exec(5) makes of a unit whose EnvironmentFile says what `file` does, and the command to start.

    The folders that systemd makes for it are in `places`.
    """
    settings: dict[str, list[str]] = {}
    for line in unit.read_text(encoding="utf-8").partition("[Service]")[2].partition("\n[")[0].splitlines():
        if match := re.fullmatch(r"([A-Za-z]+)=(.*)", line):
            settings.setdefault(match[1], []).append(match[2])
    assert settings["ProtectSystem"] == ["strict"], "what else it may be is not made here"
    environment = {"PATH": f"{BIN}:/usr/bin:/bin", "LANG": "C.UTF-8", "INVOCATION_ID": "0" * 32}
    own: dict[str, str] = {}
    for kind, parent in (("State", "/var/lib"), ("Cache", "/var/cache"), ("Runtime", "/run")):
        seen = [f"{parent}/{name}" for name in " ".join(settings.get(f"{kind}Directory", [])).split()]
        own |= {place: folder_of(NAMELESS, places / place.removeprefix("/")) for place in seen}
        if seen:
            environment[f"{kind.upper()}_DIRECTORY"] = ":".join(seen)
    for line in settings.get("Environment", []):
        environment |= dict(word.split("=", 1) for word in line.split())
    environment |= file
    [command] = settings["ExecStart"]
    command = command.replace("/usr/local/bin", str(BIN))
    words = [re.sub(r"\$\{(\w+)\}", lambda found: environment[found[1]], word) for word in command.split()]
    is_split = [re.fullmatch(r"\$(\w+)", word) for word in words]
    confinement = Confinement(
        user=NAMELESS,
        environment=environment,
        own=own,
        shared=["/tmp", "/var/tmp"] if settings.get("PrivateTmp") == ["yes"] else [],
        hidden=["/home", "/root", "/run/user"] if settings.get("ProtectHome") == ["yes"] else [],
    )
    return confinement, [
        part
        for word, split in zip(words, is_split, strict=True)
        for part in (environment[split[1]].split() if split else [word])
    ]


def confined_as_container(
    image: Path, user: int, environment: dict[str, str], volumes: dict[str, str], shared: list[str]
) -> Confinement:
    """What a container whose own files are read-only may do, with the variables that its Dockerfile sets."""
    text = image.read_text(encoding="utf-8").replace("\\\n", " ")
    [said] = re.findall(r"^ENV (.*)$", text, re.M)
    named = dict(word.split("=", 1) for word in said.split())
    [folder] = re.findall(r"^WORKDIR (.*)$", text.rpartition("\nFROM ")[2], re.M)
    named["PATH"] = f"{BIN}:/usr/bin:/bin"
    fixed = {"HOSTNAME": "noloco-node-0", "HOME": folder}  # by the image's list of users
    return Confinement(user, named | fixed | environment, volumes, shared, ["/root", "/home"], folder)


def confine(to: Confinement) -> None:
    """Make this process one of that user, with those mounts, in a root folder of its own. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
        arguments = [word.encode() for word in (source, target, kind)]
        if libc.mount(*arguments, flags, data.encode()) != 0:
            raise OSError(ctypes.get_errno(), f"mount {source} {target}")

    if libc.unshare(NEW_MOUNTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    mount("none", "/", "", RECURSIVE | PRIVATE)
    kept = {path: os.open(path, os.O_PATH) for path in NEEDED}
    own = {place: os.open(source, os.O_PATH) for place, source in to.own.items()}
    mount("tmpfs", ROOT, "tmpfs", 0, "mode=755")
    for entry in [entry for entry in Path("/").iterdir() if entry != Path(ROOT)]:
        inside = Path(ROOT) / entry.name
        if entry.is_symlink():
            inside.symlink_to(entry.readlink())
        elif entry.is_dir():
            inside.mkdir()
            mount(str(entry), str(inside), "", BIND | RECURSIVE)
    os.chroot(ROOT)
    parents = {str(Path(place).parent) for place in to.own} - {"/"}
    for place in sorted({*to.hidden, *to.shared, *parents}):
        Path(place).mkdir(parents=True, exist_ok=True)
        mount("tmpfs", place, "tmpfs", 0, f"mode={'1777' if place in to.shared else '755'}")
    for path, descriptor in kept.items():
        if not Path(path).exists():
            Path(path).mkdir(parents=True)
            mount(f"/proc/self/fd/{descriptor}", path, "", BIND | RECURSIVE)
    for place, descriptor in own.items():
        Path(place).mkdir(parents=True)
        mount(f"/proc/self/fd/{descriptor}", place, "", BIND)
    for place in mounted():
        if not place.startswith(KERNEL) and place not in (*to.own, *to.shared):
            with suppress(OSError):  # of one that another is mounted above
                mount("none", place, "", REMOUNT | BIND | READ_ONLY)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(to.user, to.user, to.user)
    os.setresuid(to.user, to.user, to.user)
    os.chdir(to.folder)


def mounted() -> Iterator[str]:
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        yield line.split()[1].encode().decode("unicode_escape")


def main() -> None:
    told = json.loads(sys.argv[1])
    confine(Confinement(**told))
    environment = told["environment"] | {"PYTHONPATH": str(Path(__file__).parents[2])}
    os.execvpe(sys.argv[2], sys.argv[2:], environment)


if __name__ == "__main__":
    main()
