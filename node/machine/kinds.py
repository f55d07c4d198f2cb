"""Kinds of things that people bring, each known by a pattern: its name for people, and what helps.

Four tables have this shape: files that stand for others (pointers.py), what is no text (data/beginnings.py), what is
no checkpoint (model/checkpoint_kinds.py), and tensors that no model here has (bootstrap/creating/held_tensors.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import AnyStr, Generic

from node.machine.named import quoted


@dataclass(frozen=True)
class Kind(Generic[AnyStr]):
    """One kind of thing.

    `pattern` is a regular expression of a file's first bytes, of its name, or of a tensor's name. In `help` {file}
    stands for the file's path, {name} and {parent} for its parts, {text}, {csv}, {folder} and {plain} for new ones.
    """

    what: str
    pattern: AnyStr
    help: str


def first_of(kinds: Iterable[Kind[AnyStr]], text: AnyStr) -> Kind[AnyStr] | None:
    """Return the first kind whose pattern the beginning of the text has; None for none."""
    return next((kind for kind in kinds if re.match(kind.pattern, text, re.DOTALL)), None)


def advice_for(kind: Kind[bytes], path: Path) -> str:
    """The help with the paths of a file, as they are typed in a shell."""

    def beside(name: str) -> str:
        return quoted(path.with_name(name))

    return kind.help.format(
        file=quoted(path),
        name=quoted(path.name),
        parent=quoted(path.parent),
        text=beside(f"{path.stem}-text.txt"),
        csv=beside(f"{path.stem}-text.csv"),
        folder=beside(f"{path.stem}-unpacked"),
        plain=beside(path.stem if path.suffix else f"{path.name}-plain"),
    )
