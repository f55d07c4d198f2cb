"""NOLOCO_… variables: which are settings of some program, which are mistyped, and which a platform has set."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import NamedTuple

ENVIRONMENT_PREFIX = "NOLOCO_"
OTHER_VARIABLES = ("PRESET", "IMAGE", "STATE")  # of the compose files and the Slurm script
NEAR = 0.75  # of `difflib`: from it on a name is a mistyped one, and not somebody else's
LIKE = 0.6  # above it one is suggested
# Kubernetes and docker's links set these of a service called noloco…: kubernetes.io/docs, "environment variables"
_PROTOCOL = "(TCP|UDP|SCTP)"
_LINK = re.compile(
    rf"NOLOCO_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_{_PROTOCOL}(_(PROTO|PORT|ADDR))?)"
)
_LINKED_PORT = re.compile(r"NOLOCO_(\w+_)?PORT")
_ADDRESS = re.compile(r"(tcp|udp|sctp)://", re.IGNORECASE)


def is_service_link(name: str, value: str) -> bool:
    """Return whether a variable is that of a service, which a platform sets; NOLOCO_PORT is one by its value."""
    is_port = _LINKED_PORT.fullmatch(name) is not None and _ADDRESS.match(value) is not None
    return is_port or _LINK.fullmatch(name) is not None


def drop_service_links(environment: MutableMapping[str, str]) -> None:
    """Take the variables of services out, so that no program takes one for a setting."""
    for name in [name for name, value in environment.items() if is_service_link(name, value)]:
        del environment[name]


class Unknown(NamedTuple):
    """A variable that is no setting, what to do about it, and whether it is a mistyped one."""

    variable: str
    advice: str
    is_mistyped: bool


def unknown_in(environment: Mapping[str, str], settings: Collection[str]) -> Iterator[Unknown]:
    """Yield the NOLOCO_… variables that no program knows, by the names of all `settings`."""
    known = [*map(str.upper, settings), *OTHER_VARIABLES]
    for variable in sorted(environment):
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name == variable or name in known:
            continue
        if near := difflib.get_close_matches(name, known, n=1, cutoff=LIKE):
            ratio = difflib.SequenceMatcher(None, name, near[0]).ratio()
            yield Unknown(variable, f"Did you mean {ENVIRONMENT_PREFIX}{near[0]}?", ratio >= NEAR)
        else:
            yield Unknown(variable, "noloco join --help lists all of them.", False)
