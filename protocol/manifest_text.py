"""A manifest as the TOML that a person would have written for it."""

from __future__ import annotations

import json
from typing import Any

from protocol.manifest import Manifest


def as_toml(manifest: Manifest) -> str:
    """Every setting, defaults included; `manifest.load_toml` reads the same manifest from it."""
    contents = manifest.model_dump(exclude_none=True)
    top = {name: value for name, value in contents.items() if not isinstance(value, dict)}
    sections = {name: value for name, value in contents.items() if isinstance(value, dict)}
    blocks = [_settings(top), *(f"[{name}]\n{_settings(values)}" for name, values in sections.items())]
    return "\n".join(blocks)


def _settings(values: dict[str, Any]) -> str:
    # JSON writes strings, numbers and lists of them as TOML does; tables within sections TOML writes inline
    return "".join(f"{name} = {_value(value)}\n" for name, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_value(inner)}" for name, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(inner) for inner in value) + "]"
    return json.dumps(value, ensure_ascii=False)
