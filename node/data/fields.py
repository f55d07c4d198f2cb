"""The text of a row: in which of its fields it is, and what of a value is text.

A field within another one is named with a dot, as answer.text, and one of a list of objects gives a list. Text is a
string, bytes that are UTF-8, a list of such by lines, or a conversation: "role: text" by lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from protocol.errors import DataError

# by which names a conversation's messages have who speaks and what
_MESSAGES = (("role", "content"), ("from", "value"), ("role", "text"), ("speaker", "text"), ("role", "parts"))
_DEEPEST = 8  # objects within each other whose fields are named in an error
_MOST_NAMED = 300  # letters of an error that names them
_NOTHING, _TWICE = object(), object()  # in place of the value of a field that is not there, or there twice


class Doubled(dict[str, object]):
    """An object of JSON that names some fields twice."""

    twice: frozenset[str] = frozenset()


def text_of(row: Mapping[str, object], field: str, where: str, *, is_first: bool = True) -> str | None:
    """The row's text, None where it has none. Raises `DataError` that names `where` and the fields to choose from.

    Of a row that is not the first the ones before it have had the field.
    """
    value = _at(row, field)
    if value is _NOTHING and not is_first:
        raise DataError(
            f"{where} has no field {field!r}, which the rows before it have. Give it one, with null where there is "
            "no text, or delete this row."
        )
    if value is _NOTHING:
        raise DataError(f"{where} has no field {field!r}. {choice(names_in(row))}")
    if value is _TWICE:
        raise DataError(f"{where} has the field {field!r} twice. Delete one of them.")
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return _decoded(value, field, where)
    lines = _lines(value, field, where)
    if lines is None:
        raise DataError(f"{where}: {field!r} holds {_kind(value)}, not text. {choice(names_in(row))}")
    return "\n".join(lines)


def has(row: object, field: str) -> bool:
    """Return whether it is an object with the field, whatever that holds."""
    return isinstance(row, Mapping) and _at(row, field) is not _NOTHING


def first_of(names: Iterable[str], field: str) -> str | None:
    """Return which of some columns `field` is, or lies in."""
    known = list(names)
    return field if field in known else next((name for name in known if field.startswith(f"{name}.")), None)


def choice(names: Iterable[str]) -> str:
    shown = [name if name.isprintable() else repr(name) for name in names]
    return f"Name the one that holds the text with --text-field: there is {', '.join(shown) or 'none'}."[
        :_MOST_NAMED
    ]


def names_in(row: Mapping[str, object]) -> list[str]:
    """The fields of a row that may hold text, by dots; all of them where none does."""
    return list(_texts_in(row, "", _DEEPEST)) or list(map(str, row))


def _at(value: object, path: str) -> object:
    """The value at a path of names with dots between; of a list, the list of what its objects have there."""
    if value is None:
        return None
    if isinstance(value, list):
        found = [_at(each, path) for each in value]
        return next((each for each in found if each is _NOTHING or each is _TWICE), found)
    if not isinstance(value, Mapping):
        return _NOTHING
    name = path if path in value else first_of(value, path)
    if name is None:
        return _NOTHING
    if isinstance(value, Doubled) and name in value.twice:
        return _TWICE
    return value[name] if name == path else _at(value[name], path[len(name) + 1 :])


def _lines(value: object, field: str, where: str) -> list[str] | None:
    """The lines of a list of texts or of a conversation; None for what is neither."""
    if isinstance(value, Mapping):
        value = _transposed(value)
    if not isinstance(value, list):
        return None
    known = [each for each in value if each is not None]
    if all(isinstance(each, str | bytes) for each in known):
        return [_decoded(each, field, where) if isinstance(each, bytes) else str(each) for each in known]
    said = [_message(each) for each in known]
    return None if None in said else [line for line in said if line]


def _transposed(value: Mapping[str, object]) -> object:
    """A conversation's messages where there is a list of who speaks and one of what, as `datasets` has it."""
    for names in _MESSAGES:
        speakers, texts = (value.get(name) for name in names)
        if isinstance(speakers, list) and isinstance(texts, list) and len(speakers) == len(texts):
            return [dict(zip(names, pair, strict=True)) for pair in zip(speakers, texts, strict=True)]
    return None


def _message(message: object) -> str | None:
    """The line of a message, empty where it has no text, as with a call of a tool; None for what is no message."""
    if not isinstance(message, Mapping):
        return None
    for speaker, text in _MESSAGES:
        if isinstance(message.get(speaker), str) and text in message:
            said = _parts(message[text])
            return None if said is None else f"{message[speaker]}: {said}" if said else ""
    return None


def _parts(content: object) -> str | None:
    """What a message says: a string, or the text in its parts, of which some may be pictures; None for no text."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if texts or all(isinstance(part, Mapping) for part in content) else None


def _texts_in(row: Mapping[str, object], before: str, deepest: int) -> Iterator[str]:
    for name, value in row.items():
        if value is None or isinstance(value, str | bytes) or _is_lines(value):
            yield f"{before}{name}"
            continue
        if isinstance(value, list):
            value = next((each for each in value if isinstance(each, Mapping)), None)
        if isinstance(value, Mapping) and deepest:
            yield from _texts_in(value, f"{before}{name}.", deepest - 1)


def _is_lines(value: object) -> bool:
    try:
        return bool(_lines(value, "", ""))
    except DataError:
        return False


def _decoded(raw: bytes, field: str, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(
            f"{where}: {field!r} holds bytes that are not UTF-8 text. Name another field with --text-field, or write "
            "these as text."
        ) from None


def _kind(value: object) -> str:
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return f"a list of {_kind(value[0]).removeprefix('an ') if value else 'nothing'}"
    return type(value).__name__
