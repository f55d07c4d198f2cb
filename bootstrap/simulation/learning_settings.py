"""What is to be tried: lists as text, all combinations of their values, and the setting that each one is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, get_args

from bootstrap.simulation.learning import LearningSetting
from protocol.errors import ManifestError
from protocol.manifest import BoundaryCodec, Manifest, manifest_from

METHODS = ("noloco", "diloco", "average", "local", "all-reduce")


def numbers(option: str, text: str, kind: type[int] | type[float], least: float) -> list[Any]:
    """The numbers of a list as 4,8. Raises `ManifestError` that names the option."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or any(not least <= value < 1e9 for value in values):
        what = "whole numbers" if kind is int else "numbers"
        raise ManifestError(f"{option} {text!r}: give {what} of at least {least}, separated by commas.")
    return values


def choices(option: str, text: str, known: Sequence[str]) -> list[str]:
    values = text.split(",")
    for value in values:
        if value not in known:
            raise ManifestError(f"{option} {value!r}: choose from {', '.join(known)}.")
    return values


def wires(option: str, text: str) -> list[dict[str, str]]:
    """The manifest's changes for a list of codecs as fp32,int8/bf16: of both directions, or activations/gradients."""
    known, result = get_args(BoundaryCodec), []
    for part in text.split(","):
        activations, _, gradients = part.partition("/")
        for codec in (activations, gradients or activations):
            choices(option, codec, known)
        result.append({"activations": activations, "gradients": gradients or activations})
    return result


def seconds(option: str, text: str) -> list[float]:
    """The durations of a list in milliseconds."""
    return [milliseconds / 1000 for milliseconds in numbers(option, text, float, 0)]


READERS: dict[str, Callable[[str], list[Any]]] = {  # of the list that each option takes
    "method": partial(choices, "--method", known=METHODS),
    "replicas": partial(numbers, "--replicas", kind=int, least=1),
    "stages": partial(numbers, "--stages", kind=int, least=1),
    "routing": partial(choices, "--routing", known=("random", "fixed")),
    "inner_steps": partial(numbers, "-k", kind=int, least=1),
    "alpha": partial(numbers, "--alpha", kind=float, least=0),
    "beta": partial(numbers, "--beta", kind=float, least=0),
    "gamma": partial(numbers, "--gamma", kind=float, least=0),
    "overlap": partial(choices, "--overlap", known=("none", "phi-early")),
    "staleness": partial(numbers, "--staleness", kind=int, least=0),
    "wire": partial(wires, "--codecs"),
    "slow": partial(numbers, "--slow", kind=float, least=1),
    "latency": partial(seconds, "--latency"),
    "mbit": partial(numbers, "--mbit", kind=float, least=0),
    "seed": partial(numbers, "--seeds", kind=int, least=0),
}


def combinations(base: Manifest, asked: Mapping[str, str | None]) -> Iterator[dict[str, Any]]:
    """Arguments of `one_setting`: every combination of the lists in `asked`; without a list it stays as in `base`.

    Raises `ManifestError`.
    """
    lists = {name: READERS[name](text) for name, text in asked.items() if text is not None}
    lists.setdefault("staleness", [base.inner.staleness])
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values, strict=True))


def one_setting(
    base: Manifest,
    steps: int,
    microbatches: int,
    sequences: int,
    *,
    method: str = "noloco",
    replicas: int = 4,
    stages: int = 2,
    routing: str = "random",
    seed: int = 0,
    slow: float = 1.0,
    latency: float = 0.0,
    mbit: float = 0.0,
    validation_sequences: int = 512,
    staleness: int = 0,
    wire: dict[str, Any] | None = None,
    inner: dict[str, Any] | None = None,
    **outer: Any,
) -> LearningSetting:
    """`base` with changes, validated anew. Raises `ManifestError`."""
    contents = base.model_dump()
    contents["stages"], contents["routing"] = stages, routing
    contents["inner"].update(
        total_steps=steps,
        warmup_steps=min(contents["inner"]["warmup_steps"], steps - 1),
        microbatches=microbatches,
        sequences=sequences,
        staleness=staleness,
        **(inner or {}),
    )
    contents["wire"].update(wire or {})
    contents["outer"].update(outer)
    if method != "all-reduce":
        contents["outer"]["method"] = method
    made = manifest_from(contents)
    return LearningSetting(
        made, replicas, seed, method == "all-reduce", slow, latency, mbit, validation_sequences
    )
