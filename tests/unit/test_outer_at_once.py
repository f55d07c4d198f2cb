"""An outer step in one launch, as on a GPU, is the one in two functions."""

from __future__ import annotations

import pytest
import torch

from node.model.outer import (
    contribution,
    fused_on,
    outer_step,
    outer_step_at_once,
)
from tests.unit.test_outer import PUBLISHED, Replicas, assert_close


def at_once_and_apart(added_is_mean: bool, is_alone: bool) -> tuple[Replicas, Replicas]:
    """φ and δ after a step in one launch, and after the one in two functions, both float32; θ is φ then."""
    phi, theta, delta, pull = torch.randn(4, 70_001, generator=torch.Generator().manual_seed(3))
    own = contribution(theta, phi, PUBLISHED)
    mean = own if is_alone else own + pull
    apart = [phi.clone(), delta.clone()]
    outer_step(apart[0], apart[1], mean, PUBLISHED)
    weights = (PUBLISHED.alpha, PUBLISHED.beta, -PUBLISHED.beta)
    if added_is_mean:
        pull, weights = mean, (PUBLISHED.alpha, 0.0, -PUBLISHED.gamma)
    outer_step_at_once(phi, delta, theta, None if is_alone and not added_is_mean else pull, weights)
    assert torch.equal(theta, phi)
    return [phi, delta], apart


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("added_is_mean", [False, True])
def test_in_one_launch_it_is_the_same_step(
    added_is_mean: bool, is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.model.outer.fused_on", lambda _: None)
    assert_close(*at_once_and_apart(added_is_mean, is_alone), tolerance=2e-6)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_it_is_the_same_step() -> None:
    assert fused_on(torch.device("cpu")) is not None, "there is a compiler here"
    for added_is_mean in (False, True):
        for is_alone in (False, True):
            assert_close(*at_once_and_apart(added_is_mean, is_alone), tolerance=2e-6)


def test_where_it_cannot_be_compiled_it_goes_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object, **__: object) -> object:
        def fail(*_: object) -> None:
            raise RuntimeError("no Triton here")

        return fail

    fused_on.cache_clear()
    monkeypatch.setattr(torch, "compile", failing)
    try:
        assert_close(*at_once_and_apart(False, False), tolerance=2e-6)
    finally:
        fused_on.cache_clear()
    assert "The outer step is not compiled here" in caplog.text
