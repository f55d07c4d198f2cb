"""The defence of the average: whom it lets through, how far others get, and when it stops talking to them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import node.rounds.defence
from node.membership.ledger import OFFENCES, QUARANTINE_SECONDS
from node.model.flat import layout
from node.rounds.defence import (
    FAR,
    GROSSLY_FAR,
    GROWTH,
    VOTES,
    Defence,
    Examination,
    PartnerHistory,
    blocks_of,
)
from protocol.ground import PeerId
from tests.far_device import far_device

GAMMA = BETA = 0.7
CLIP = 1.5
SIZES = (600, 300, 100)
SIZE = sum(SIZES)
BLOCKS = [slice(0, 600), slice(600, 900), slice(900, 1000)]


class Swarm:
    """Honest contributions made up: a common progress and as much noise, around a spread of φ.

    Mutable state: the generator, and the scale of everything that changes within a round.
    """

    def __init__(self, seed: int = 0, scale: float = 1e-3) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.scale = scale
        self.common = self.normal()
        self.phi = self.normal()

    def normal(self) -> torch.Tensor:
        return torch.randn(SIZE, generator=self.generator)

    def progress(self) -> torch.Tensor:
        return self.scale * (self.common + 1.5 * self.normal())

    def z(self, spread: float = 1.0, progress: torch.Tensor | None = None) -> torch.Tensor:
        phi = self.phi + spread * self.scale * self.normal()
        return GAMMA * phi + BETA * (self.progress() if progress is None else progress)

    def own_z(self) -> torch.Tensor:
        return GAMMA * self.phi + BETA * self.progress()

    def meet(self, defence: Defence, peer: object, partners: torch.Tensor | None = None) -> Examination:
        return self.look(defence, peer, self.own_z(), self.z() if partners is None else partners)[0]

    def look(
        self, defence: Defence, peer: object, own: torch.Tensor, partners: torch.Tensor
    ) -> tuple[Examination, torch.Tensor]:
        """What the defence finds, and the pull that it leaves."""
        pull, progress = partners / 2 - own / 2, own - GAMMA * self.phi
        finding = defence.examine(PeerId(str(peer)), pull, progress.__getitem__, now=0.0)
        return finding, pull


def new_defence(clip: float = CLIP) -> Defence:
    return Defence(BLOCKS, clip)


def experienced(swarm: Swarm, meetings: int = 20) -> Defence:
    defence = new_defence()
    for number in range(meetings):
        swarm.meet(defence, number)
    return defence


def lengths(pull: torch.Tensor) -> list[float]:
    return [float(pull[block].double().norm()) for block in BLOCKS]


# --- the honest ---------------------------------------------------------------------------------


def test_honest_partners_are_hardly_ever_clipped_and_never_offend() -> None:
    swarm = Swarm()
    defence = experienced(swarm)
    findings = [swarm.meet(defence, number % 19) for number in range(300)]
    assert sum(finding.clipped for finding in findings) / len(findings) < 0.01
    assert all(finding.offence is None for finding in findings)
    assert not any(defence.ledger.is_quarantined(PeerId(str(number)), 0.0) for number in range(19))


def test_what_is_not_clipped_stays_the_same_bit_for_bit() -> None:
    swarm = Swarm()
    defence = experienced(swarm)
    own, partners = swarm.own_z(), swarm.z()
    finding, pull = swarm.look(defence, "x", own, partners)
    assert finding.clipped == 0.0
    assert torch.equal(pull, partners / 2 - own / 2)


def test_a_young_replica_takes_partners_within_a_multiple_of_its_own_progress() -> None:
    swarm = Swarm()
    assert swarm.meet(new_defence(), "first").clipped == 0.0
    finding = swarm.meet(new_defence(), "first", swarm.z() + 1.0)
    assert finding.clipped == 1.0
    assert finding.offence == "far"


def test_the_radius_follows_the_learning_rate_down_and_up() -> None:
    swarm = Swarm()
    defence = experienced(swarm)
    for factor, rounds in ((1.0, 1), (0.93, 80), (100.0, 1), (1.0, 20)):
        for number in range(rounds):
            swarm.scale *= factor
            finding = swarm.meet(defence, number)
            assert finding.offence is None
            assert 1.0 < finding.radius / finding.distance < 3


def test_the_radius_follows_distances_that_grow_and_shrink_by_themselves() -> None:
    """As after a partition: all partners are far away, because this replica is."""
    swarm = Swarm()
    defence = experienced(swarm)
    before = swarm.meet(defence, "a").radius
    for number in range(4 * VOTES):
        finding = swarm.meet(defence, f"far {number}", swarm.z(spread=30.0))
    assert finding.clipped == 0.0
    assert finding.radius > 5 * before
    for number in range(2 * VOTES):
        finding = swarm.meet(defence, f"near {number}")
    assert finding.radius == pytest.approx(before, rel=0.3)


# --- attackers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("excess", [1.5, 5.0, 1e3])
def test_an_outlier_is_drawn_inside_the_radius_the_more_the_further_it_is(excess: float) -> None:
    swarm = Swarm()
    defence = experienced(swarm)
    radius = swarm.meet(defence, "someone").radius
    own = swarm.own_z()
    push = swarm.normal()
    partners = own + push * (excess * radius / push.norm())
    finding, pull = swarm.look(defence, "x", own, partners)
    assert finding.distance == pytest.approx(excess * radius, rel=1e-3)
    assert finding.clipped == 1.0
    assert 2 * pull.norm().item() == pytest.approx(radius / excess, rel=0.3)  # blocks have radii of their own
    assert torch.nn.functional.cosine_similarity(pull, push, dim=0) > 0.9
    assert (finding.offence == "far") == (
        excess > GROSSLY_FAR
    )  # no direction of this replica's: merely behind


@pytest.mark.parametrize("times", [-1.0, 1.0])
def test_who_is_far_along_or_against_this_replicas_progress_is_reproached_with_it(times: float) -> None:
    swarm = Swarm()
    defence = experienced(swarm)
    radius = swarm.meet(defence, "someone").radius
    own = swarm.own_z()
    push = times * (own - GAMMA * swarm.phi)
    finding, _ = swarm.look(defence, "x", own, own + push * ((FAR + 1) * radius / push.norm()))
    assert finding.offence in ("far", "opposed")


def test_an_attack_on_one_layer_does_not_hide_in_the_norm_of_the_whole() -> None:
    swarm = Swarm()
    defence = experienced(swarm)
    own, partners = swarm.own_z(), swarm.z()
    attacked = BLOCKS[2]
    honest = lengths(partners - own)[2]
    partners[attacked] = own[attacked] + 3 * honest / SIZES[2] ** 0.5
    finding, pull = swarm.look(defence, "x", own, partners)
    assert finding.distance < finding.radius
    assert finding.clipped == SIZES[2] / SIZE
    assert 2 * lengths(pull)[2] < 1.5 * honest
    assert torch.equal(pull[: attacked.start], (partners / 2 - own / 2)[: attacked.start])


@pytest.mark.parametrize("length", [0.0, 1.0, 10.0, 1e30])
def test_a_minority_of_attackers_cannot_move_the_radius_beyond_what_honest_partners_say(
    length: float,
) -> None:
    swarm, push = Swarm(), Swarm(1).normal()
    defence = experienced(swarm)
    honest = [(finding := swarm.meet(defence, number)).radius / finding.distance for number in range(VOTES)]
    for number in range(100):
        if number % 5 < 2:  # 40 %
            finding = swarm.meet(defence, f"bad {number}", swarm.own_z() + push * length)
        else:
            finding = swarm.meet(defence, f"good {number}")
            assert 0.6 * min(honest) < finding.radius / finding.distance < 1.6 * max(honest)


def test_one_partner_has_one_vote_however_often_it_is_met() -> None:
    swarm = Swarm()
    defence = experienced(swarm)
    before = swarm.meet(defence, "good").radius
    for _ in range(50):
        finding = swarm.meet(defence, "bad", swarm.z() + 1.0)
    assert finding.radius < 1.5 * before


def test_a_partner_that_opposes_what_all_others_want_counts_for_nothing() -> None:
    swarm = Swarm()
    defence = experienced(swarm)
    own = swarm.own_z()
    partners = swarm.z(progress=-swarm.progress())
    finding, pull = swarm.look(defence, "x", own, partners)
    assert finding.offence == "opposed"
    assert finding.agreement < 0
    assert not pull.any()


def test_where_partners_agree_on_nothing_nobody_is_opposed() -> None:
    swarm = Swarm()
    swarm.common.zero_()
    defence = experienced(swarm)
    findings = [swarm.meet(defence, number) for number in range(100)]
    assert all(finding.offence is None for finding in findings)


def test_a_replica_that_gets_nowhere_blames_nobody() -> None:
    swarm = Swarm()
    defence = experienced(swarm)
    idle = GAMMA * swarm.phi
    for number in range(30):
        finding, _ = swarm.look(defence, number, idle, swarm.z())
        assert finding.offence is None
        assert finding.clipped < 1.0 or number > 0


@given(
    seed=st.integers(0, 2**31),
    length=st.floats(0, 1e38),
    clip=st.floats(0.1, 10),
    scale=st.sampled_from([0.0, 1e-30, 1e-3, 1e3]),
)
def test_whatever_comes_the_result_is_finite_and_within_the_radius(
    seed: int, length: float, clip: float, scale: float
) -> None:
    swarm = Swarm(seed, scale)
    defence = new_defence(clip)
    for number in range(6):
        own = swarm.own_z()
        partners = torch.nan_to_num(own + swarm.normal() * length)
        finding, pull = swarm.look(defence, number, own, partners)
        assert torch.isfinite(pull).all()
        assert np.isfinite(finding.radius)
        assert -1.0 <= finding.agreement <= 1.0
        assert 0.0 <= finding.clipped <= 1.0
        if finding.clipped == 1.0:
            rounding = 1e-6 * float(own.norm())
            assert 2 * pull.norm() <= max(finding.radius * len(BLOCKS), rounding) * 1.001


@given(
    votes=st.lists(
        st.tuples(st.integers(0, 30), st.floats(0, allow_infinity=True, allow_nan=False)), max_size=60
    )
)
def test_the_usual_ratio_stays_within_the_bounds_of_the_votes(votes: list[tuple[int, float]]) -> None:
    history = PartnerHistory(np.array([2.0]))
    cast = [2.0]
    for peer, ratio in votes:
        limit = CLIP * history.usual_ratios()
        cast.append(min(ratio, GROWTH * limit[0]))
        history.note(PeerId(str(peer)), np.array([ratio]), limit, 0.0)
        assert min(cast) <= history.usual_ratios()[0] <= max(cast)


# --- work in chunks -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda swarm: swarm.z(), lambda swarm: swarm.z() + 0.01])
def test_chunks_give_what_the_whole_gives(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Swarm], torch.Tensor]
) -> None:
    def look(chunk: int) -> tuple[Examination, torch.Tensor]:
        monkeypatch.setattr(node.rounds.defence, "CHUNK", chunk)
        swarm = Swarm()
        defence = experienced(swarm)
        return swarm.look(defence, "x", swarm.own_z(), make(swarm))

    (whole, from_whole), (parts, from_parts) = look(2**18), look(64)
    assert parts.distance == pytest.approx(whole.distance, rel=1e-5)
    assert parts.radius == pytest.approx(whole.radius, rel=1e-5)
    assert parts.agreement == pytest.approx(whole.agreement, abs=1e-5)
    assert (parts.clipped, parts.offence) == (whole.clipped, whole.offence)
    assert torch.allclose(from_parts, from_whole, atol=1e-6)


def test_another_device_is_waited_for_once_whatever_the_size_and_finds_the_same() -> None:
    size, blocks = 300_000, [slice(0, 200_000), slice(200_000, 299_000), slice(299_000, 300_000)]
    generator = torch.Generator().manual_seed(5)
    progress = 1e-3 * torch.randn(size, generator=generator)
    here = 3e-3 * torch.randn(size, generator=generator)
    expected = Defence(blocks, CLIP).examine(PeerId("a"), pull := here.clone(), progress.__getitem__, now=0.0)
    with far_device() as device:
        far, far_progress = device.holding(here), device.holding(progress)
        found = Defence(blocks, CLIP).examine(PeerId("a"), far, far_progress.__getitem__, now=0.0)
        assert device.waits == 1
        assert device.launches < 8 * len(blocks)
        clipped = far.cpu()
    assert expected.clipped
    assert found.distance == pytest.approx(expected.distance, rel=1e-5)
    assert found.agreement == pytest.approx(expected.agreement, abs=1e-6)
    assert (found.clipped, found.offence) == (expected.clipped, expected.offence)
    assert torch.allclose(clipped, pull, rtol=1e-4, atol=0)


def test_each_matrix_is_a_block_and_all_vectors_are_one() -> None:
    slices = layout({"a": (3, 4), "norm": (4,), "b": (2, 2), "last": (5,)})
    assert blocks_of(slices, slice(0, 25)) == [slice(0, 12), slice(12, 16), slice(16, 25)]
    assert blocks_of(layout({"a": (3, 4)}), slice(0, 12)) == [slice(0, 12)]


def test_a_fragment_has_blocks_of_its_own_of_what_it_cuts() -> None:
    slices = layout({"a": (3, 4), "norm": (4,), "b": (2, 2), "last": (5,)})
    assert blocks_of(slices, slice(0, 14)) == [slice(0, 12), slice(12, 14)]
    assert blocks_of(slices, slice(14, 18)) == [slice(0, 2), slice(2, 4)]
    assert blocks_of(slices, slice(18, 25)) == [slice(0, 7)]


# --- quarantine ---------------------------------------------------------------------------------


def test_gross_and_malformed_contributions_lead_to_quarantine() -> None:
    swarm = Swarm()
    defence = experienced(swarm)
    for _ in range(OFFENCES - 1):
        assert not swarm.meet(defence, "bad", swarm.z() + 1.0).quarantined
    assert defence.ledger.record_meeting(PeerId("bad"), True, 0.0)
    assert defence.ledger.is_quarantined(PeerId("bad"), 1.0)
    assert not defence.ledger.is_quarantined(PeerId("bad"), QUARANTINE_SECONDS)
