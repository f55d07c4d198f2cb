"""docs/answers.md has the bounds of all answers; `python -m tests.unit.test_answers_page` prints them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from protocol.codecs.codec import encode
from protocol.messages import Asks
from protocol.messages.layouts import Layout
from tests.unit.test_door import requests
from tests.unit.test_frames import EXAMPLES

PAGE = Path(__file__).parents[2] / "docs" / "answers.md"
EXAMPLE = {type(message): message for message in EXAMPLES}
SENT = [encode(torch.zeros(2, 3, 5), "fp32")]


def fields_of(schema: dict[str, Any], defs: dict[str, Any], name: str) -> Iterator[tuple[str, str]]:
    """The name and the bound of each value that a JSON schema allows."""
    if "$ref" in schema:
        schema = defs[schema["$ref"].rsplit("/", 1)[-1]]
    if "anyOf" in schema:
        (schema,) = (kind for kind in schema["anyOf"] if kind.get("type") != "null")
        yield from fields_of(schema, defs, name)
    elif "prefixItems" in schema:
        for number, part in enumerate(schema["prefixItems"]):
            yield from fields_of(part, defs, f"{name}.{part.get('title', number).lower().replace(' ', '_')}")
    elif schema.get("type") == "array":
        most = schema.get("maxItems")
        yield from fields_of(schema["items"], defs, f"{name}[{most if most is not None else '?'}]")
    elif schema.get("type") == "object":
        if "properties" in schema:
            for inner, part in schema["properties"].items():
                yield from fields_of(part, defs, f"{name}.{inner}" if name else inner)
        else:
            yield from fields_of(
                schema["additionalProperties"], defs, f"{name}[{schema.get('maxProperties', '?')}]"
            )
    else:
        yield name, bound_of(schema)


def bound_of(schema: dict[str, Any]) -> str:
    kind = schema.get("type")
    if kind in ("number", "integer"):
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        if low is None and high is None:
            return "±10^15"
        return f"{'whole, ' if kind == 'integer' else ''}{shown(low)} to {'10^15' if high is None else shown(high)}"
    if "enum" in schema:
        return "of a list"
    if kind == "string":
        most = schema.get("maxLength")
        what = "bytes" if schema.get("format") == "binary" else "characters"
        return f"{most:,} {what}" if most is not None else "a peer id or the like"
    return kind or "anything"


def shown(number: Any) -> str:
    if number and abs(number) >= 1e6:
        power = math.log2(number)
        return (
            f"2^{power:.0f}"
            if power == int(power)
            else f"{number:.3g}".replace("e+0", "e+").replace("1e+", "10^").replace("e+", "·10^")
        )
    return f"{number:g}"


def tensors_of(layouts: Sequence[Layout]) -> str:
    """The tensors of an answer; "…" is a size that the request has."""

    def sizes(layout: Layout) -> str:
        return ", ".join("*" if size is None else "…" for size in layout.shape)

    return ", ".join(f"{'/'.join(layout.codecs)} [{sizes(layout)}]" for layout in layouts)


def row(kind: type[Asks]) -> str:
    reply: Any = kind.reply()
    schema = reply.model_json_schema()
    by_bound: dict[str, list[str]] = {}
    for name, bound in fields_of(schema, schema.get("$defs", {}), ""):
        by_bound.setdefault(bound, []).append(name)
    fields = "; ".join(f"{bound}: {', '.join(names)}" for bound, names in by_bound.items())
    example: Any = EXAMPLE[kind]
    return f"| {kind.kind} | {reply.kind} | {fields or '–'} | {tensors_of(example.layouts(SENT)) or 'none'} |"


def table() -> str:
    rows = (row(kind) for kind in sorted(requests(), key=lambda kind: kind.kind))
    return "\n".join(["| request | answer | values, each within | tensors |", "|---|---|---|---|", *rows])


def test_the_page_has_every_bound() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    print(table())
