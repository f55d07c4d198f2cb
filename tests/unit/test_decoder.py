"""The decoder's layers against transformers' own: logits, gradients and what is said, of every family."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F

from node.model.decoder import KeyValues, Rotary, visible
from node.model.stage import Stage, logits_through
from protocol.run.manifest import Manifest
from protocol.run.model import ATTENTION_BIAS, SLIDING, Family
from tests.unit.whole_models import (
    ROPES,
    VARIANTS,
    manifest_cut,
    some_tokens,
    stages_of,
    transformers_model,
)

SPREAD = 0.2  # of the weights: with the usual 0.02 attention is all but even
CUTS = [1, 2, 4]


def settings_of(variant: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {f"model__{name}": value for name, value in {**variant, **others}.items()}


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    """Within 1e-5 of their length."""
    distance = float((ours - theirs).detach().norm() / theirs.detach().norm().clamp(min=1e-12))
    assert distance < 1e-5, f"{what}: {distance:.1e}"


def assert_the_same(manifest: Manifest) -> None:
    """As transformers' model of the same configuration and weights: logits, and the gradient of every parameter."""
    parts = stages_of(manifest)
    whole, tokens = transformers_model(parts, manifest), some_tokens(manifest)
    both = logits_through(parts, tokens), whole(tokens).logits
    assert_near(*both, "logits")
    for logits in both:
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    theirs = {name: p.grad for name, p in whole.named_parameters()}
    for stage in parts:
        for name, parameter in stage.named_parameters():
            gradient = theirs[stage.checkpoint_name(name)]
            assert parameter.grad is not None
            assert gradient is not None
            assert_near(parameter.grad, gradient, name)


@pytest.mark.parametrize("stages", CUTS)
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_stages_together_are_transformers_own_model(variant: str, is_tied: bool, stages: int) -> None:
    assert_the_same(manifest_cut(stages, **settings_of(VARIANTS[variant], tied_embeddings=is_tied)))


@pytest.mark.parametrize("rope", ["default", *ROPES])
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", get_args(Family))
def test_every_family_with_every_stretch_biases_and_window(family: Family, is_tied: bool, rope: str) -> None:
    """One after another, each with and without."""
    biases = [False, True] if family in ATTENTION_BIAS else [False]
    windows = [0, 7] if family in SLIDING else [0]
    for bias, window in product(biases, windows):
        settings = {"family": family, "kv_heads": 1, "init_std": SPREAD, "tied_embeddings": is_tied}
        settings |= {"attention_bias": bias, "mlp_bias": bias and family == "llama", "sliding_window": window}
        if rope in ROPES:
            settings |= {"rope": ROPES[rope], "max_positions": 16}
        assert_the_same(manifest_cut(1, **settings_of(settings)))


def greedily(parts: list[Stage], prompt: torch.Tensor, count: int, keeps: bool) -> list[int]:
    """The next `count` tokens, by what is kept of those before, or by all of them each time."""
    caches = [KeyValues() for _ in parts]
    tokens, given = prompt, prompt
    for _ in range(count):
        hidden = given if keeps else tokens
        for stage, cache in zip(parts, caches, strict=True):
            hidden = stage(hidden, cache=cache if keeps else None)
        if parts[0].is_ring:
            hidden = parts[0](hidden, is_back=True)
        given = hidden[:, -1].argmax(dim=-1, keepdim=True)
        tokens = torch.cat((tokens, given), dim=1)
    return tokens[0, prompt.shape[1] :].tolist()


@torch.no_grad()
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_said_is_what_transformers_says(variant: str, stages: int) -> None:
    """By keys and values that are kept, also behind a window."""
    manifest = manifest_cut(stages, **settings_of(VARIANTS[variant], init_std=SPREAD))
    parts = stages_of(manifest)
    whole, prompt = transformers_model(parts, manifest), some_tokens(manifest)[:1, :6]
    said = greedily(parts, prompt, 24, keeps=True)
    expected = whole.generate(prompt, do_sample=False, max_new_tokens=24, pad_token_id=0)
    assert said == expected[0, 6:].tolist()
    if variant != "dynamic":  # there a longer text turns its first tokens otherwise
        assert said == greedily(parts, prompt, 24, keeps=False)


@torch.no_grad()
def test_a_piece_of_several_tokens_goes_on_where_the_cache_ends() -> None:
    for variant in ("llama", "qwen3's window"):
        [stage] = parts = stages_of(manifest_cut(1, **settings_of(VARIANTS[variant], init_std=SPREAD)))
        tokens, cache = some_tokens(manifest_cut(1))[:1], KeyValues()
        pieces = [stage(piece, cache=cache) for piece in tokens.split(9, dim=1)]
        assert cache.tokens == tokens.shape[1]
        assert_near(torch.cat(pieces, dim=1), logits_through(parts, tokens), variant)


def test_what_is_kept_is_counted() -> None:
    manifest = manifest_cut(2, model__kv_heads=1)
    stage, cache = Stage(manifest, 0), KeyValues()
    assert (cache.tokens, cache.nbytes) == (0, 0)
    stage(some_tokens(manifest)[:1, :5], cache=cache)
    assert cache.tokens == 5
    values = 5 * manifest.model.head_size * len(manifest.layers_of(0))
    assert cache.nbytes == 2 * 4 * values  # keys and values in float32


@pytest.mark.parametrize(
    ("tokens", "past", "window", "seen"),
    [
        (1, 5, 0, None),
        (5, 0, 0, None),
        (5, 0, 5, None),
        (1, 3, 4, None),
        (3, 0, 2, ["100", "110", "011"]),
        (1, 3, 2, ["0011"]),
        (2, 2, 0, ["1110", "1111"]),
        (2, 3, 3, ["01110", "00111"]),
    ],
)
def test_a_token_sees_those_before_it_within_the_window(
    tokens: int, past: int, window: int, seen: list[str] | None
) -> None:
    mask = visible(tokens, past, window, torch.device("cpu"))
    assert (mask if mask is None else ["".join("01"[s] for s in row) for row in mask.tolist()]) == seen


def test_dynamic_positions_depend_on_the_length_alone() -> None:
    """Not on what was computed before, as in transformers: two nodes would give two answers."""
    manifest = manifest_cut(1, **settings_of(VARIANTS["dynamic"]))
    rotary = Rotary(manifest.model, manifest.positions)
    short, middle, long = (torch.zeros(1, length, 4) for length in (16, 20, 32))
    first = [rotary(hidden, 0)[1] for hidden in (middle, short)]
    rotary(long, 0)
    again = [rotary(hidden, 0)[1] for hidden in (middle, short)]
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert not torch.allclose(first[0][:16], first[1])
