"""How the processes of `pytest -n` share out the tests."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

from tests.clock_rules import REAL_FOLDERS

REAL_PATHS = tuple(f"tests/{folder}/" for folder in REAL_FOLDERS)


class RealOnesTogether(LoadScopeScheduling):
    """Tests in real time run one after another, in one of the processes; the others wherever there is room.

    By the path and not by the mark `xdist_group`: pytest 9.2 keeps the name of a test where xdist 3.8 writes its
    group, which so groups nothing.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(test: str) -> str:
    return "real" if test.startswith(REAL_PATHS) else test
