"""Files that stand for others, which are yet to be fetched: of Git LFS, Xet and git-annex."""

from __future__ import annotations

# what a file that is fetched later has in its place, by its first bytes
POINTERS = {
    b"version https://git-lfs.github.com/spec/": ("Git LFS", "git lfs pull"),
    b"# xet version ": ("Xet", "git xet checkout, or git lfs pull"),
    b"/annex/objects/": ("git-annex", "git annex get ."),
}
POINTER_BYTES = max(map(len, POINTERS))


def pointer_in(beginning: bytes) -> str:
    """What a file that begins so is in place of the file itself, and what helps; empty where it is the file."""
    for start, (system, command) in POINTERS.items():
        if beginning.startswith(start):
            return f"it is a {system} pointer. In that folder: {command}"
    return ""
