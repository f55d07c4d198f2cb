"""Gradients out of all proportion are recognised, and a scale that has changed for good is accepted in the end."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from node.pipeline.gradient_screen import ENOUGH, HISTORY, PROPORTION, TOO_SLOW, Lag, Norms, Repeats
from node.pipeline.source import LONGEST_PAUSE, TOLD_SECONDS, DropBackoff
from protocol.ground import PeerId


def after(*values: float) -> Norms:
    norms = Norms()
    for value in values:
        norms.kept(value)
    return norms


def test_a_thousand_times_the_usual_norm_is_outlying_and_a_hundred_times_is_not() -> None:
    assert after(*[0.1] * ENOUGH).kept(1.01 * 0.1 * PROPORTION) == 0
    assert after(*[0.1] * ENOUGH).kept(0.1 * PROPORTION / 10) > 0


def test_nothing_is_judged_by_too_few_or_by_zeros() -> None:
    assert after(*[0.1] * (ENOUGH - 1)).kept(1e30) > 0
    assert after(*[0.0] * HISTORY).kept(1.0) > 0


@given(st.lists(st.floats(1e4, 1e30), max_size=HISTORY // 2 - 1))
def test_less_than_half_of_lies_change_nothing(lies: list[float]) -> None:
    norms = after(*[1.0] * HISTORY, *lies)
    assert norms.kept(1e6) == 0
    assert norms.kept(2.0) > 0


def test_a_scale_that_has_changed_for_good_is_accepted_after_half_a_history() -> None:
    norms = after(*[1e-3] * HISTORY)
    judged = [norms.kept(10.0) == 0 for _ in range(HISTORY)]
    assert judged[0]
    assert not judged[-1]


def test_drops_in_a_row_are_followed_ever_more_slowly_and_told_once_a_minute() -> None:
    dropped, now, told, pauses = DropBackoff(), 0.0, 0, []
    while now < 10 * TOLD_SECONDS:
        pauses.append(dropped.note())
        told += dropped.due_report(now) > 0
        now += pauses[-1]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE
    assert told <= 10
    dropped.reset()
    assert dropped.note() == pauses[0]


def test_a_stage_is_too_slow_when_it_takes_several_times_as_long_as_the_one_before() -> None:
    assert Lag(here=90.0, stage=45.0, before=2.0).is_too_slow
    assert not Lag(here=90.0, stage=2.0 * TOO_SLOW, before=2.0).is_too_slow


def test_a_batch_with_one_gradient_999_times_the_usual_goes_the_honest_way() -> None:
    """Failed before: a cosine of -0.03."""
    generator = torch.Generator().manual_seed(1)
    common = torch.randn(256, generator=generator)
    honest = [common + 0.5 * torch.randn(256, generator=generator) for _ in range(8)]
    norms = after(*[float(gradient.norm()) for gradient in honest])
    attack = -999 * torch.randn(256, generator=generator)
    bounded = norms.kept(float(attack.norm())) * attack
    step = torch.stack([*honest[:7], bounded]).sum(0)
    assert torch.cosine_similarity(step, torch.stack(honest).sum(0), dim=0) > 0.95


# --- answers that come again --------------------------------------------------------------------

FREE_RIDER, HONEST = PeerId("free rider"), PeerId("honest")


def gradient(seed: int, common: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1_000))
    return torch.randn(2, 32, 64, generator=generator) + common * shared


def text(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_an_answer_given_before_is_recognised_also_with_noise_or_another_length() -> None:
    repeats = Repeats()
    for seed in range(5):
        assert not repeats.is_repeated(HONEST, text(seed), gradient(seed))
    assert not repeats.is_repeated(FREE_RIDER, text(50), gradient(50))
    assert repeats.is_repeated(FREE_RIDER, text(51), gradient(50))
    assert repeats.is_repeated(FREE_RIDER, text(52), 7.0 * gradient(50) + 0.1 * gradient(51))
    assert not repeats.is_repeated(HONEST, text(53), gradient(50))  # of another peer that is no sign


def test_a_text_that_is_sent_again_may_have_the_same_answer_again() -> None:
    repeats = Repeats()
    for seed in range(5):
        repeats.is_repeated(HONEST, text(seed), gradient(seed))
    assert not any(repeats.is_repeated(HONEST, text(4), gradient(4)) for _ in range(5))


def test_where_all_answers_are_alike_nobody_is_blamed_for_it() -> None:
    repeats = Repeats()
    judged = [repeats.is_repeated(HONEST, text(seed), gradient(seed, common=10.0)) for seed in range(40)]
    assert not any(judged[2:])


def test_one_position_that_has_most_of_the_norm_does_not_make_answers_alike() -> None:
    """As the first one of a text whose activation is small; honest peers were struck for it, and banned after ten."""
    repeats, first = Repeats(), gradient(1)[0, 0]
    for seed in range(40):
        answer = gradient(seed)
        answer[0, 0] = 1e3 * first
        assert not repeats.is_repeated(HONEST, text(seed), answer)
    assert repeats.is_repeated(HONEST, text(99), answer)


def test_zeros_are_no_answer_that_comes_again() -> None:
    repeats = Repeats()
    assert not any(repeats.is_repeated(HONEST, text(n), torch.zeros(4, 4)) for n in range(3))
