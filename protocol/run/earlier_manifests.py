"""Manifests that earlier versions signed, read at the meaning that they had then: a signed manifest lives for ever.

A setting that was removed and is off there changes nothing, and is left out. One that is on changes what is trained:
the manifest is read all the same, so that the model can be exported, evaluated and asked, and says why this version
does not train it. Nobody but a run's owner could change its manifest, and then it would be another run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Removed:
    """A setting, or one of its values, that this version does not have."""

    section: str
    setting: str
    is_on: object  # the value, or the range of them, that changes what is trained or who takes part
    instead: (
        object | None
    )  # what the setting says in place of it here; None: there is no such setting any more
    last: str  # the last commit that trains with it


REMOVED = (
    Removed("outer", "drift_control", True, None, "965d5ee"),
    Removed("outer", "overlap", "late", "none", "477d5e3"),
    Removed("outer", "weighting", "tokens", None, "0e3ddf9"),
    Removed("wire", "error_feedback", True, None, "0e3ddf9"),
    Removed("access", "work_bits", range(1, 33), None, "0e3ddf9"),
)


@dataclass(frozen=True)
class Missed:
    """A removed setting that is on in a manifest: this version does not train what it says."""

    setting: str  # "outer.drift_control = true"
    last: str


def as_read_now(contents: object) -> tuple[object, Missed | None]:
    """The contents of an earlier version's manifest without what was removed, and the first setting that it misses.

    Contents are unchecked before and after.
    """
    missed: Missed | None = None
    for gone in REMOVED:
        section = contents.get(gone.section) if isinstance(contents, Mapping) else None
        if (
            not isinstance(contents, Mapping)
            or not isinstance(section, Mapping)
            or gone.setting not in section
        ):
            continue
        value, rest = section[gone.setting], dict(section)
        on = gone.is_on
        is_on = type(value) is int and value in on if isinstance(on, range) else value == on
        if gone.instead is None:
            if type(value) is not (int if isinstance(on, range) else type(on)):
                continue  # nothing that any version wrote: it is refused by its name
            del rest[gone.setting]
        elif is_on:
            rest[gone.setting] = gone.instead
        contents = {**contents, gone.section: rest}
        if is_on:
            missed = missed or Missed(f"{gone.section}.{gone.setting} = {_written(value)}", gone.last)
    return contents, missed


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'
