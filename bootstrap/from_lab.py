"""Finds parts of bootstrap/lab by their names: nothing outside imports it, and nodes run without it."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from node.command import App, fail
from protocol.errors import MissingPackage

LAB = "bootstrap.lab"


def from_lab(place: str) -> Any:
    """Return an object of the lab by its place, such as "placement.plan_cli:plan".

    Raises `MissingPackage` where this copy of the project has no lab.
    """
    try:
        return pkgutil.resolve_name(f"{LAB}.{place}")
    except ModuleNotFoundError as error:
        if error.name != LAB:
            raise
        raise MissingPackage(
            "This copy of noloco-node has no lab (plans, simulations, disturbed swarms): its folder bootstrap/lab "
            "is missing. Install noloco-node again, as a whole."
        ) from None


def missing_command() -> None:
    """Explain that this copy of noloco-node has no such command."""
    try:
        from_lab("chaos.chaos:run_both")
    except MissingPackage as error:
        fail(error)


def command_from_lab(place: str) -> Callable[..., None] | App:
    """Return a command of the lab, `missing_command` where this copy has no lab."""
    try:
        command: Callable[..., None] | App = from_lab(place)
    except MissingPackage:
        return missing_command
    return command
