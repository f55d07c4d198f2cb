"""Layouts: which tensors an answer has, checked by their specs before anything is decoded.

A request says it by itself (`Asks.layouts`), so that nobody who asks has to, and no tensor of another type, number or
shape is ever seen by whoever asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from protocol.codecs.codec import FLOATING, Encoded, TensorSpec
from protocol.errors import CodecError

Shape = tuple[int | None, ...]  # None: any number of at least one
EXACT = ("fp32",)  # state, which is compared bit by bit
TOKENS = ("int32",)


class Layout(NamedTuple):
    """One tensor of an answer: the codecs that it may travel in, and its shape."""

    shape: Shape
    codecs: tuple[str, ...] = FLOATING
    may_lack: bool = False

    def fits(self, spec: TensorSpec) -> bool:
        """Return whether a tensor that came is one of these."""
        return spec.codec in self.codecs and _are_alike(self.shape, spec.shape)


def _are_alike(wanted: Shape, came: Sequence[int]) -> bool:
    return len(wanted) == len(came) and all(
        size >= 1 if want is None else size == want for want, size in zip(wanted, came, strict=True)
    )


def like_the_first(sent: Sequence[Encoded]) -> list[Layout]:
    """The layout of an answer as large as the first tensor that was sent, in any codec of weights and activations."""
    return [Layout(tensor.shape) for tensor in sent[:1]]


def require_layouts(specs: Sequence[TensorSpec], layouts: Sequence[Layout]) -> None:
    """Check the tensors of an answer. Raises `CodecError`, which says what came and what was expected."""
    fewest = sum(not layout.may_lack for layout in layouts)
    if fewest <= len(specs) <= len(layouts) and all(
        layout.fits(spec) for layout, spec in zip(layouts, specs, strict=False)
    ):
        return
    came = _named([(spec.codec, spec.shape) for spec in specs])
    wanted = _named([("/".join(layout.codecs), layout.shape) for layout in layouts])
    raise CodecError(f"the answer has {came} where {wanted} belongs")


def _named(tensors: Sequence[tuple[str, Shape]]) -> str:
    """Name tensors for people: "fp32 [2, 64], int32 [4]", with * for any size."""
    shapes = (
        (codec, ", ".join("*" if size is None else str(size) for size in shape)) for codec, shape in tensors
    )
    return ", ".join(f"{codec} [{shape}]" for codec, shape in shapes) or "no tensor"
