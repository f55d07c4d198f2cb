"""Small damage to good bytes: what reaches deeper than noise does."""

from __future__ import annotations

from hypothesis import strategies as st

INTERESTING = (
    b"\x00",
    b"\xff",
    b"\xc1",
    b"\xc4",
    b"\xc7",
    b"\xd9",
    b"\xdf\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\x7f",
)


@st.composite
def damaged(draw: st.DrawFn, corpus: list[bytes]) -> bytes:
    """One of the corpus with a few bytes changed, taken out, put in, repeated, or another one's end."""
    raw = bytearray(draw(st.sampled_from(corpus)))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(raw)))
        size = draw(st.integers(1, 8))
        match draw(st.sampled_from(("set", "cut", "put", "repeat", "splice"))):
            case "set":
                raw[place : place + 1] = draw(st.binary(min_size=1, max_size=1))
            case "cut":
                del raw[place : place + size]
            case "put":
                raw[place:place] = draw(st.sampled_from(INTERESTING) | st.binary(max_size=8))
            case "repeat":
                raw[place:place] = raw[place : place + size] * draw(st.integers(1, 40))
            case "splice":
                other = draw(st.sampled_from(corpus))
                raw[place:] = other[draw(st.integers(0, len(other))) :]
    return bytes(raw)
