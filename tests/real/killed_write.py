"""A write to a state directory in a process that is killed at one of its calls to the system."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from node.storage.state_directory import StateDirectory

CALLS = ("open", "close", "fsync", "ftruncate", "rename", "replace", "unlink", "mkdir", "link")

Write = Callable[[StateDirectory], None]


def killed_at(call: int, *, is_after: bool, path: Path, write: Write) -> bool:
    """Do `write` in a forked process that is killed before or after its call number `call`; True if it was."""
    child = os.fork()
    if child == 0:
        try:
            state = StateDirectory(path)
            state.open()
            _Killing(call, is_after).begin()
            write(state)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


class _Killing:
    """Counts calls to the system by which files are opened, written, renamed, removed, locked or flushed."""

    def __init__(self, last: int, is_after: bool) -> None:
        self._last, self._is_after, self._calls = last, is_after, 0

    def begin(self) -> None:
        opened: Any = os.fdopen
        write = self._counted(os.write)

        def half_written(descriptor: int, mode: str = "r", *rest: Any, **named: Any) -> Any:
            return _InHalves(descriptor, write) if mode == "wb" else opened(descriptor, mode, *rest, **named)

        os.fdopen = half_written  # type: ignore[assignment]
        for name in CALLS:
            setattr(os, name, self._counted(getattr(os, name)))
        fcntl.flock = self._counted(fcntl.flock)

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self._calls += 1
            if self._calls == self._last and not self._is_after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*arguments, **named)
            if self._calls == self._last:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return counted


class _InHalves:
    """A file without a buffer, each write of which is two calls: a kill leaves half of it."""

    def __init__(self, descriptor: int, write: Callable[[int, bytes], int]) -> None:
        self._descriptor, self._write = descriptor, write

    def write(self, data: bytes | memoryview) -> int:
        whole = bytes(data)
        self._write(self._descriptor, whole[: len(whole) // 2])
        self._write(self._descriptor, whole[len(whole) // 2 :])
        return len(whole)

    def writelines(self, lines: Iterable[bytes | memoryview]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> _InHalves:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
