"""Orders to nodes that run on this machine, through the sockets that their state directories name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from node.watch.health import Report, Unwell, look
from protocol.errors import UserError


def ordered(
    asked: Sequence[Path], order: str, said: Mapping[str, Any] = MappingProxyType({})
) -> list[tuple[Path, Report]]:
    """Give the node of each directory an order, with what is `said` beside it; return their answers.

    Raises `UserError` when one does not answer, or does not do it: others may have done it by then.
    """
    try:
        answers = [(directory, look(directory, order=order, said=said)) for directory in asked]
    except Unwell as silence:
        raise silent(silence) from None
    for directory, report in answers:
        if "refused" in report:
            raise UserError(
                f"The node does not do that: {report['refused']}. Start it again with this version."
            )
        if "cannot" in report:
            others = " The other nodes have done it." if len(answers) > 1 else ""
            raise UserError(f"The node of {directory} stays as it is: {report['cannot']}{others}")
    return answers


def silent(silence: Unwell) -> UserError:
    """Return the error for a node that does not answer."""
    return UserError(f"There is nothing to talk to: {silence}. Name the state directory with --state-dir.")
