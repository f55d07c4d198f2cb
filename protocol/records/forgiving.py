"""Reading what a later version writes: entries and words that this one does not know pass.

Fields that are not known pass in answers and records by their own rule (`Message`, `Entry`). Their number and size
are bounded by what holds them: a frame's header, a record.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BeforeValidator, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

RowT = TypeVar("RowT", bound=type[tuple[Any, ...]])


def open_ended(row: RowT) -> RowT:
    """Decorate a `NamedTuple` that travels as an array: entries after those that it knows are passed over."""
    known = len(row._fields)  # type: ignore[attr-defined]

    def first(value: object) -> object:
        return value[:known] if isinstance(value, list | tuple) else value

    def schema(cls: object, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(first, handler(source))

    row.__get_pydantic_core_schema__ = classmethod(schema)  # type: ignore[attr-defined]
    return row


def otherwise(word: str, *known: str) -> BeforeValidator:
    """Take a word that is none of the `known` ones for `word`, which is one of them."""

    def read(value: object) -> object:
        return word if isinstance(value, str) and value not in known else value

    return BeforeValidator(read)
