"""How much of the length that averaging takes away a replica gives back."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.model.replica import Replica
from node.rounds.defence import Examination
from node.rounds.gain import LEAST_MEETINGS, LONGEST, PARTNERS, Gain, cosine
from node.rounds.pull import Pull
from node.rounds.round_statistics import RoundStatistics
from protocol.errors import ManifestError
from protocol.ground import PeerId
from protocol.run.manifest import load_preset
from protocol.run.signed_manifest import canonical_bytes
from tests.swarm.micro import micro_manifest, run_swarm
from tests.unit.two_ends import mean_phi, two_ends, whole_round


def met(returned: float, *shared: float) -> Gain:
    """After a meeting with each of so many partners."""
    gain = Gain(returned)
    for number, each in enumerate(shared):
        gain.met(PeerId(f"partner {number}"), each)
    return gain


@pytest.mark.parametrize("replicas", [2, 3, 5, 10])
def test_the_whole_length_is_that_of_a_mean_over_all(replicas: int) -> None:
    """A fifth of the energy is shared: the mean over all, made longer, is as long as the progress of one."""
    rng = torch.Generator().manual_seed(1)
    size, shared = 40_000, 0.2
    signal = torch.randn(size, generator=rng) * math.sqrt(shared)
    progress = signal + torch.randn(replicas, size, generator=rng) * math.sqrt(1 - shared)
    gain = met(1.0, *[cosine(progress[0], other) for other in progress[1:]] * LEAST_MEETINGS)
    lengthened = gain.factor(replicas) * progress.mean(0).norm()
    assert float(lengthened) == pytest.approx(float(progress[0].norm()), rel=0.03)


def test_half_of_it_is_the_root() -> None:
    assert met(0.5, 0.1, 0.1, 0.1).factor(4) == pytest.approx(math.sqrt(met(1.0, 0.1, 0.1, 0.1).factor(4)))


def test_nothing_is_given_back_where_nothing_was_lost() -> None:
    shared = [0.1] * LEAST_MEETINGS
    assert met(0.0, *shared).factor(8) == 1.0  # nobody asked for it
    assert met(1.0, *shared).factor(1) == 1.0  # alone
    assert met(1.0, 1.0, 1.0, 1.0).factor(8) == 1.0  # all agree
    assert met(1.0, *shared[1:]).factor(8) == 1.0  # too few were met


@given(st.lists(st.floats(-1, 1), max_size=2 * PARTNERS), st.integers(0, 10_000), st.floats(0, 1))
def test_the_factor_is_bounded_whatever_partners_and_records_say(
    shared: list[float], replicas: int, returned: float
) -> None:
    assert 1.0 <= met(returned, *shared).factor(replicas) <= min(LONGEST, max(1, replicas) ** 0.5) + 1e-9


@given(st.floats(-1, 1))
def test_a_partner_among_many_that_lies_about_its_progress_moves_it_little(lie: float) -> None:
    honest = [0.10, 0.11, 0.12, 0.13, 0.14]
    factor = met(0.5, *honest, lie).factor(8)
    assert met(0.5, *honest, 1.0).factor(8) <= factor <= met(0.5, *honest, -1.0).factor(8)
    assert factor == pytest.approx(met(0.5, *honest).factor(8), rel=0.02)


def test_a_partner_that_is_met_often_has_one_vote() -> None:
    gain = met(0.5, 0.10, 0.11, 0.12)
    for _ in range(50):
        gain.met(PeerId("liar"), -1.0)
    assert gain.factor(8) == pytest.approx(met(0.5, 0.10, 0.11, 0.12).factor(8), rel=0.02)


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan, 1e30])
def test_what_has_no_cosine_shares_nothing(value: float) -> None:
    assert cosine(torch.ones(4), torch.full((4,), value)) == 0.0
    assert cosine(torch.full((4,), value), torch.zeros(4)) == 0.0


def test_replicas_that_agree_fully_share_all_however_it_is_rounded() -> None:
    rng = torch.Generator().manual_seed(1)
    for _ in range(100):
        progress = torch.randn(4_096, generator=rng)
        assert cosine(progress, 3 * progress) == pytest.approx(1.0, abs=1e-5)


def test_a_replica_makes_its_own_progress_longer_and_nothing_else() -> None:
    replica = Replica(micro_manifest(outer__gain=0.5, outer__alpha=0.0, outer__beta=1.0, outer__gamma=1.0), 0)
    before = replica.phi.clone()
    replica.flat.values.add_(1.0)
    replica.lengthen(1.5)
    assert torch.allclose(replica.whole.contribution() - before, torch.full_like(before, 1.5), atol=1e-5)
    replica.finish_round_alone(replica.whole)
    assert torch.allclose(replica.phi - before, torch.ones_like(before), atol=1e-5)


PLAIN: dict[str, Any] = {"outer__alpha": 0.0, "outer__beta": 1.0, "outer__gamma": 1.0, "wire__gossip": "fp32"}


def test_a_pairs_mean_moves_by_the_longer_steps_of_both() -> None:
    async def main() -> None:
        a, b = await two_ends(outer__gain=0.5, **PLAIN)
        for end, factor in ((a, 1.5), (b, 1.25)):
            end.replica.lengthen(factor)
        before = mean_phi(a, b)
        moved = await whole_round(a, b, 0)
        assert torch.allclose(mean_phi(a, b), before + (1.5 * moved[0] + 1.25 * moved[1]) / 2, atol=1e-6)
        assert torch.allclose(a.replica.phi, b.replica.phi, atol=1e-6)
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_where_a_partners_pull_does_not_count_the_own_step_is_no_longer_than_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A liar that makes others refuse it does not make their steps longer, nor has it a vote on how long they are."""

    def opposed(self: RoundStatistics, peer: PeerId, pull: Pull) -> Examination:
        pull.whole().zero_()
        return Examination(1.0, 1.0, -1.0, 1.0, "opposed", quarantined=False)

    async def main() -> None:
        a, b = await two_ends(outer__gain=0.5, **PLAIN)
        a.replica.lengthen(1.5)
        phi = a.replica.phi.clone()
        moved = await whole_round(a, b, 0)
        assert torch.allclose(a.replica.phi, phi + moved[0], atol=1e-6)
        for number in range(1, LEAST_MEETINGS + 1):
            await whole_round(a, b, number)
        assert a.replica.whole.settings.beta == 1.0
        await asyncio.gather(a.close(), b.close())

    monkeypatch.setattr(RoundStatistics, "defend", opposed)
    run_swarm(main())


@pytest.mark.parametrize(
    ("setting", "value"),
    [("method", "diloco"), ("overlap", "phi-early"), ("method", "average"), ("method", "local")],
)
def test_a_run_that_cannot_have_it_says_so(setting: str, value: str) -> None:
    with pytest.raises(ManifestError, match=r"outer\.gain needs"):
        micro_manifest(outer__gain=0.5, **{f"outer__{setting}": value})


def test_a_run_without_it_is_written_as_it_always_was() -> None:
    assert b'"gain"' not in canonical_bytes(load_preset("llama-125m"))
