"""Answers that were compared: who agrees, who is odd, and what the ledger makes of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.membership.ledger import (
    ACQUAINTED_SECONDS,
    ALWAYS_WRONG,
    CHECKS,
    OFTEN_WRONG,
    PROOFS,
    QUARANTINE_SECONDS,
    Ledger,
)
from node.pipeline.checks import agree, judged
from protocol.ground import PeerId

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def near(gradient: torch.Tensor, part: float, seed: int) -> torch.Tensor:
    """With noise of so much of its norm."""
    noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(seed))
    return gradient + part * gradient.norm() / noise.norm() * noise


TRUE = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))


@given(st.integers(0, 100))
def test_replicas_a_spread_apart_agree(seed: int) -> None:
    assert agree(near(TRUE, 0.5, 2 * seed), near(TRUE, 0.5, 2 * seed + 1))


@pytest.mark.parametrize(
    "wrong", [-TRUE, 10 * TRUE, 0.01 * TRUE, torch.zeros_like(TRUE), near(0 * TRUE + 1, 9, 3)]
)
def test_another_sign_or_length_or_direction_is_odd_among_three(wrong: torch.Tensor) -> None:
    honest = {A: near(TRUE, 0.4, 1), B: near(TRUE, 0.4, 2)}
    verdict = judged({**honest, C: wrong})
    assert verdict.odd == C
    assert verdict.agreeing == {A, B}


def test_of_two_that_disagree_nobody_is_odd_nor_of_three_that_all_do() -> None:
    assert judged({A: TRUE, B: -TRUE}).odd is None
    others = [near(0 * TRUE + 1, 9, seed) for seed in (1, 2)]
    verdict = judged({A: TRUE, B: others[0], C: others[1]})
    assert verdict.odd is None
    assert not verdict.agreeing


def test_trust_takes_proofs_and_time_and_ends_with_one_that_is_wrong() -> None:
    ledger = Ledger()
    for _ in range(PROOFS - 1):
        ledger.record_check(A, True, 0.0, OFTEN_WRONG)
    assert not ledger.is_proven(A)
    ledger.record_check(A, True, 1.0, OFTEN_WRONG)
    assert ledger.is_proven(A)
    assert not ledger.is_familiar(A, ACQUAINTED_SECONDS - 1)
    assert ledger.is_familiar(A, ACQUAINTED_SECONDS)
    assert not ledger.is_familiar(B, ACQUAINTED_SECONDS)
    assert not ledger.is_doubted(A)
    assert not ledger.record_check(A, False, 5_000.0, OFTEN_WRONG)
    assert not ledger.is_proven(A)
    assert ledger.is_doubted(A)


@pytest.mark.parametrize("most", [OFTEN_WRONG, ALWAYS_WRONG])
def test_who_is_wrong_too_often_is_left_alone_for_a_while(most: int) -> None:
    ledger = Ledger()
    for _ in range(CHECKS):
        assert not ledger.record_check(A, True, 0.0, most)
    assert [ledger.record_check(A, False, 0.0, most) for _ in range(most)] == [False] * (most - 1) + [True]
    assert ledger.is_quarantined(A, QUARANTINE_SECONDS - 1)
    assert not ledger.is_quarantined(A, QUARANTINE_SECONDS + 1)


def test_rare_wrong_answers_are_forgiven() -> None:
    ledger = Ledger()
    assert not any(ledger.record_check(A, number % CHECKS != 0, 0.0, OFTEN_WRONG) for number in range(200))
