"""Advice to a person about a setting of a manifest that cannot be used."""

from __future__ import annotations

import difflib
from typing import get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

REMOVED = {  # settings and values that manifests may still name, and what to do without them
    "outer.drift_control": "this setting was removed: take the line out. Rounds have outer.inner_steps steps, "
    'or what outer.pace "time" makes of them',
    "outer.weighting": "this setting was removed: take the line out. A pair's progress counts half and half",
    "wire.error_feedback": "this setting was removed: take the line out. Rounding errors average out without it",
    "access.work_bits": "this setting was removed: take the line out. access.private says who may enter",
    "outer.overlap = late": '"late" was removed: use "phi-early" with wire.progress "int8", or "none"',
}
WORDED = {  # what a pattern asks for, for people
    "name": "it begins with a letter or a digit, and has only those, dots, hyphens and underscores, as my-run.1",
    "data.tokenizer": '"bytes", or sha256: and 64 digits, which --tokenizer writes by itself',
}


def advice(problem: ErrorDetails, manifest: type[BaseModel]) -> str:
    """One of pydantic's findings about a `manifest` as a sentence, without its full stop."""
    place, kind, message = problem["loc"], problem["type"], problem["msg"]
    setting = ".".join(str(part) for part in place)
    if removed := REMOVED.get(setting) or REMOVED.get(f"{setting} = {str(problem['input'])[:16]}"):
        return f"{setting}: {removed}"
    if kind == "missing":
        return f"{setting} is missing: add it"
    if kind == "extra_forbidden":
        known = _settings_beside(manifest, place)
        close = difflib.get_close_matches(str(place[-1]), known, n=1, cutoff=0.7)
        meant = f'Did you mean "{close[0]}"?' if close else f"Known here: {', '.join(known)}"
        return f"{setting} is not a setting: remove it or correct its name. {meant}"
    if kind == "string_pattern_mismatch" and setting in WORDED:
        return f"{setting} cannot be {str(problem['input'])[:64]!r}: {WORDED[setting]}"
    told = message.removeprefix("Value error, ").replace("Input should", "it should")
    # what our own validators say names the setting already
    return told if kind == "value_error" or not setting else f"{setting} cannot be used: {told}"


def _settings_beside(section: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    for part in place[:-1]:
        field = section.model_fields.get(str(part))
        kind = field.annotation if field is not None else None
        for inner in (kind, *get_args(kind)):  # of a list those of its entries
            section = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else section
    return list(section.model_fields)
