"""Packages that only some commands need: a volunteer's node does without."""

from __future__ import annotations

import importlib
from typing import Any

from protocol.errors import UserError


def optional(module: str, extra: str) -> Any:
    """The module, which `pip install 'noloco-node[extra]'` brings. Raises `UserError` that says so."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        if (error.name or "").split(".")[0] != package:
            raise
        raise UserError(
            f"This needs the package {package}, which is not installed: pip install 'noloco-node[{extra}]'."
        ) from None
