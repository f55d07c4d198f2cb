"""The outer step: its two forms, what it conserves, what it equals, and how far it lets replicas drift."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.model.outer import (
    OuterSettings,
    contribution,
    covariance_recursion,
    outer_step,
    stationary_covariance,
    stationary_variance,
)
from protocol.codecs.kernels import BLOCK
from protocol.codecs.lattice import as_sent, cell_for, distance_of, to_lattice
from protocol.codecs.near_codecs import BITS, SPARE, kept_apart
from protocol.run.manifest import gamma_bound
from tests.unit.outer_reference import outer_step_reference

PUBLISHED = OuterSettings(alpha=0.5, beta=0.7, gamma=0.7)
Replicas = list[torch.Tensor]

settings_strategy = st.builds(OuterSettings, st.floats(0, 0.95), st.floats(0.1, 1.5), st.floats(0, 1.5))
seeds = st.integers(0, 2**31)


def random_state(seed: int, members: int, size: int = 11) -> tuple[Replicas, Replicas, Replicas]:
    """φ, θ, δ of every member: float64 [size] of order one."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(3, members, size, generator=generator, dtype=torch.float64)
    return list(draw[0]), list(draw[1]), list(draw[2])


def step_in_production_form(
    phi: Replicas, theta: Replicas, delta: Replicas, settings: OuterSettings
) -> tuple[Replicas, Replicas]:
    """What the members of one group compute when each gets the mean of all contributions."""
    mean_z = torch.stack([contribution(t, p, settings) for t, p in zip(theta, phi, strict=True)]).mean(0)
    phi, delta = [p.clone() for p in phi], [d.clone() for d in delta]
    for p, d in zip(phi, delta, strict=True):
        outer_step(p, d, mean_z, settings)
    return phi, delta


def assert_close(left: Replicas, right: Replicas, tolerance: float = 1e-13) -> None:
    assert (torch.stack(left) - torch.stack(right)).abs().max() <= tolerance


@given(settings=settings_strategy, gamma_is_beta=st.booleans(), seed=seeds, members=st.integers(1, 6))
def test_one_exchanged_tensor_does_what_two_do(
    settings: OuterSettings, gamma_is_beta: bool, seed: int, members: int
) -> None:
    if gamma_is_beta:
        settings = replace(settings, gamma=settings.beta)
    state = random_state(seed, members)
    for one, two in zip(
        step_in_production_form(*state, settings), outer_step_reference(*state, settings), strict=True
    ):
        assert_close(one, two)


def test_with_beta_equal_to_gamma_the_exchanged_tensor_is_theta_times_beta() -> None:
    phi, theta, _ = random_state(0, 1)
    assert torch.equal(contribution(theta[0], phi[0], PUBLISHED), 0.7 * theta[0])


@given(settings=settings_strategy, seed=seeds, members=st.integers(1, 6))
def test_the_mean_over_a_group_moves_by_momentum_and_progress_alone(
    settings: OuterSettings, seed: int, members: int
) -> None:
    phi, theta, delta = (torch.stack(part) for part in random_state(seed, members))
    new_phi, _ = step_in_production_form(list(phi), list(theta), list(delta), settings)
    expected = phi.mean(0) + settings.alpha * delta.mean(0) + settings.beta * (theta - phi).mean(0)
    assert_close([torch.stack(new_phi).mean(0)], [expected])


@given(settings=settings_strategy, seed=seeds, members=st.integers(1, 6))
def test_a_group_of_all_with_equal_slow_weights_is_diloco(
    settings: OuterSettings, seed: int, members: int
) -> None:
    phi, theta, delta = random_state(seed, members)
    phi, delta = [phi[0]] * members, [delta[0]] * members
    new_phi, _ = step_in_production_form(phi, theta, delta, settings)
    momentum = settings.alpha * delta[0] + settings.beta * (torch.stack(theta).mean(0) - phi[0])
    assert_close(new_phi, [phi[0] + momentum] * members)


@given(settings=settings_strategy, seed=seeds)
def test_a_replica_without_a_partner_feels_no_pull(settings: OuterSettings, seed: int) -> None:
    phi, theta, delta = random_state(seed, 1)
    _, new_delta = step_in_production_form(phi, theta, delta, settings)
    assert_close(new_delta, [settings.alpha * delta[0] + settings.beta * (theta[0] - phi[0])])


@given(settings=settings_strategy, seed=seeds, order=st.permutations(range(5)))
def test_permuting_replicas_permutes_the_result(settings: OuterSettings, seed: int, order: list[int]) -> None:
    phi, theta, delta = random_state(seed, 5)
    permuted = ([part[i] for i in order] for part in (phi, theta, delta))
    after = step_in_production_form(phi, theta, delta, settings)
    a, b, c = permuted
    of_permuted = step_in_production_form(a, b, c, settings)
    for original, other in zip(after, of_permuted, strict=True):
        assert_close([original[i] for i in order], other)


@given(
    settings=settings_strategy,
    seed=seeds,
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    rounds=st.integers(1, 3),
)
def test_the_mean_over_all_replicas_is_the_same_whatever_the_groups(
    settings: OuterSettings, seed: int, sizes: list[int], rounds: int
) -> None:
    """For given displacements Δ the mean of φ follows DiLoCo's, however the replicas are grouped."""
    members = sum(sizes)
    phi, _, delta = random_state(seed, members)
    mean_phi, mean_delta = torch.stack(phi).mean(0), torch.stack(delta).mean(0)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(rounds):
        progress = torch.randn(members, 11, generator=generator, dtype=torch.float64)
        order = torch.randperm(members, generator=generator).tolist()
        for size in sizes:
            group, order = order[:size], order[size:]
            state = [phi[i] for i in group], [phi[i] + progress[i] for i in group], [delta[i] for i in group]
            for i, new_phi, new_delta in zip(group, *step_in_production_form(*state, settings), strict=True):
                phi[i], delta[i] = new_phi, new_delta
        mean_delta = settings.alpha * mean_delta + settings.beta * progress.mean(0)
        mean_phi = mean_phi + mean_delta
        assert_close([torch.stack(phi).mean(0)], [mean_phi], tolerance=1e-11)


def test_several_rounds_of_one_group_of_all_are_torchs_momentum_on_the_mean_progress() -> None:
    """DiLoCo's outer optimizer, in torch's own words: the gradient is −β·mean(Δ), the learning rate 1."""
    members, settings = 4, OuterSettings(alpha=0.3, beta=0.7, gamma=0.9)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(11, generator=generator, dtype=torch.float64)
    phi, delta = [start] * members, [torch.zeros_like(start)] * members
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=settings.alpha)
    for _ in range(6):
        theta = [p + torch.randn(11, generator=generator, dtype=torch.float64) for p in phi]
        parameter.grad = -settings.beta * (torch.stack(theta).mean(0) - parameter.detach())
        optimizer.step()
        phi, delta = step_in_production_form(phi, theta, delta, settings)
        assert_close(phi, [parameter.detach()] * members)


def test_only_phi_and_delta_change() -> None:
    (phi,), (theta,), (delta,) = random_state(1, 1)
    before = phi.clone(), theta.clone(), delta.clone()
    z = contribution(theta, phi, OuterSettings(0.5, 0.7, 0.6))
    kept = z.clone()
    outer_step_reference([phi], [theta], [delta], PUBLISHED)
    assert all(torch.equal(a, b) for a, b in zip((phi, theta, delta), before, strict=True))
    outer_step(phi, delta, z, PUBLISHED)
    assert torch.equal(theta, before[1])
    assert torch.equal(z, kept)
    assert not torch.equal(phi, before[0])
    assert not torch.equal(delta, before[2])


def test_fast_weights_of_lower_precision_are_averaged_in_float32() -> None:
    phi = torch.full((3,), 1 / 3)
    theta = phi.to(torch.bfloat16).requires_grad_()
    for settings in (PUBLISHED, OuterSettings(0.5, 0.7, 0.6)):
        z = contribution(theta, phi, settings)
        assert z.dtype == torch.float32
        assert not z.requires_grad
        expected = settings.beta * theta.detach().float() + (settings.gamma - settings.beta) * phi
        assert torch.allclose(z, expected, rtol=1e-6)


# Standard deviations of φ over replicas in units of s, α = 0.5, β = γ = 0.7, by Monte Carlo
TABLE: dict[float, dict[int | None, float]] = {
    0.0: {4: 0.655, 8: 0.900, 16: 1.023, 64: 1.115, None: 1.146},
    0.1: {4: 0.617, 8: 0.823, 16: 0.922, 64: 0.994},
}


@pytest.mark.parametrize(
    ("kappa", "replicas", "expected"), [(k, n, std) for k, row in TABLE.items() for n, std in row.items()]
)
def test_the_stationary_spread_is_the_known_one(kappa: float, replicas: int | None, expected: float) -> None:
    assert math.sqrt(stationary_variance(PUBLISHED, replicas, kappa)) == pytest.approx(expected, abs=5e-4)
    sigma = np.zeros((2, 2))
    for _ in range(200):
        sigma = covariance_recursion(sigma, PUBLISHED, replicas, kappa)
    np.testing.assert_allclose(sigma, stationary_covariance(PUBLISHED, replicas, kappa), rtol=1e-9)


@given(alpha=st.floats(0, 0.9), fraction=st.floats(0.05, 0.95), beta=st.floats(0.1, 1), noise=st.floats(0, 4))
def test_the_spread_of_many_replicas_has_a_closed_form(
    alpha: float, fraction: float, beta: float, noise: float
) -> None:
    gamma = fraction * gamma_bound(alpha)
    expected = beta**2 * noise * (1 + alpha) / (gamma * (2 * (1 - alpha**2) - gamma))
    settings = OuterSettings(alpha, beta, gamma)
    assert stationary_variance(settings, noise_variance=noise) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("alpha", "bound"), [(0.3, 1.82), (0.5, 1.5), (0.7, 1.02), (0.9, 0.38)])
def test_pairs_are_stable_exactly_below_the_bound(alpha: float, bound: float) -> None:
    assert gamma_bound(alpha) == pytest.approx(bound, abs=1e-9)
    assert math.isfinite(stationary_variance(OuterSettings(alpha, 0.7, bound - 1e-3)))
    assert stationary_variance(OuterSettings(alpha, 0.7, bound + 1e-3)) == math.inf
    assert stationary_variance(OuterSettings(alpha, 0.7, 0.0)) == math.inf  # nothing holds them together


@pytest.mark.parametrize("codec", BITS)
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5])
def test_what_rounding_puts_back_lowers_the_bound(alpha: float, codec: str) -> None:
    rounding = kept_apart(codec)
    bound = gamma_bound(alpha, kept_apart=rounding)
    assert bound < gamma_bound(alpha)
    assert math.isfinite(stationary_variance(OuterSettings(alpha, 0.7, bound - 1e-3, rounding)))
    assert stationary_variance(OuterSettings(alpha, 0.7, bound + 1e-3, rounding)) == math.inf


@pytest.mark.parametrize("codec", BITS)
@pytest.mark.parametrize("replicas", [2, 4, 7])
def test_replicas_that_average_modulo_a_few_bits_settle_as_far_apart_as_foretold(
    codec: str, replicas: int
) -> None:
    """With the codec itself, cells made as in a round for what each pair differs by, and progress that is noise."""
    gamma = 0.3 if codec == "mod2" else 0.5  # nearer to its bound, errors of the cells' sizes grow
    settings = OuterSettings(0.3, 0.7, gamma, kept_apart(codec))
    generator, rng = torch.Generator().manual_seed(replicas), np.random.default_rng(replicas)
    parameters, bits = BLOCK * 20, BITS[codec]
    phi, delta = torch.zeros(2, replicas, parameters)
    sigma, measured, foretold = np.zeros((2, 2)), 0.0, 0.0
    for number in range(60):
        z = settings.gamma * phi + settings.beta * torch.randn(phi.shape, generator=generator)
        mean, order = z.clone(), rng.permutation(replicas)
        for one, other in zip(order[: replicas // 2 * 2 : 2], order[1::2], strict=True):
            cells = cell_for(SPARE * distance_of(z[one], z[other]).clamp_min(1e-3), bits)
            sent = [as_sent(z[i], to_lattice(z[i], cells, [number], bits), [number]) for i in (one, other)]
            mean[one] += (sent[1] - sent[0]) / 2
            mean[other] += (sent[0] - sent[1]) / 2
        delta = settings.alpha * delta + mean - settings.gamma * phi
        phi = phi + delta
        sigma = covariance_recursion(sigma, settings, replicas)
        if number >= 20:
            measured += float((phi - phi.mean(0)).square().mean())
            foretold += sigma[0, 0]
    assert measured == pytest.approx(foretold, rel=0.15)


@pytest.mark.parametrize(("offset", "stable"), [(-1e-3, True), (1e-3, False)])
def test_groups_of_four_are_stable_exactly_below_their_own_bound(offset: float, stable: bool) -> None:
    """Of a member's variance 1/n is its group's, which M_S moves; the rest is its own, which M_D moves."""
    alpha, n = 0.5, 4
    gamma = gamma_bound(alpha, n) + offset
    across = np.array([[1, alpha], [0, alpha]])
    inside = np.array([[1 - gamma, alpha], [-gamma, alpha]])
    operator = np.kron(across, across) / n + np.kron(inside, inside) * (n - 1) / n
    assert (max(abs(np.linalg.eigvals(operator))) < 1) == stable


@pytest.mark.parametrize("replicas", [4, 8, 16, 64, 256, 1024])
def test_an_initial_disagreement_is_gone_after_about_a_dozen_rounds(replicas: int) -> None:
    sigma, rounds = np.diag([1.0, 0.0]), 0
    while sigma[0, 0] > 0.01:
        sigma = covariance_recursion(sigma, PUBLISHED, replicas, noise_variance=0.0)
        rounds += 1
    assert 9 <= rounds <= 12


@pytest.mark.parametrize("replicas", [0, -2])
def test_there_is_no_spread_of_no_replicas(replicas: int) -> None:
    with pytest.raises(ValueError, match="from 1"):
        stationary_variance(PUBLISHED, replicas)


def test_one_replica_has_no_spread() -> None:
    assert stationary_variance(PUBLISHED, 1) == 0.0


@pytest.mark.parametrize("kappa", [0.0, 0.1])
def test_a_lone_replica_in_each_round_widens_the_spread(kappa: float) -> None:
    """An odd swarm lies above its even neighbours, and the difference fades with its size."""
    stds = {n: math.sqrt(stationary_variance(PUBLISHED, n, kappa)) for n in range(2, 66)}
    assert all(stds[n] > max(stds[n - 1], stds[n + 1]) for n in range(3, 65, 2))
    assert stds[63] / stds[64] < 1.02 < stds[5] / stds[6]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors: on busy cores several threads wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pairs_at_random(
    replicas: int, kappa: float, samples: int, rounds: int, generator: torch.Generator
) -> torch.Tensor:
    """φ [samples, replicas] of independent one-parameter swarms after `rounds` of the production step.

    Replicas are interchangeable, so shuffling them and pairing neighbours draws the pairs of each sample; with
    an odd number the last one is alone.
    """
    phi, delta = torch.zeros(2, samples, replicas)
    paired = replicas - replicas % 2
    for _ in range(rounds):
        order = torch.from_numpy(torch.rand(samples, replicas, generator=generator).numpy().argsort(1))
        phi, delta = phi.gather(1, order), delta.gather(1, order)
        theta = phi * (1 - kappa) + torch.randn(samples, replicas, generator=generator)
        mean_z = contribution(theta, phi, PUBLISHED)
        pairs = mean_z[:, :paired].view(samples, -1, 2)
        pairs.copy_(pairs.mean(2, keepdim=True).expand_as(pairs))
        outer_step(phi, delta, mean_z, PUBLISHED)
    return phi


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kappa", [0.0, 0.1])
@pytest.mark.parametrize(
    ("replicas", "samples"),
    [(3, 20_000), (4, 20_000), (5, 20_000), (7, 20_000), (8, 20_000), (16, 20_000), (64, 10_000)],
)
def test_the_predicted_spread_is_that_of_the_production_step_within_two_percent(
    replicas: int, samples: int, kappa: float
) -> None:
    generator = torch.Generator().manual_seed(1000 * replicas + round(10 * kappa))
    phi = pairs_at_random(replicas, kappa, samples, 40, generator)
    measured = phi.var(1, correction=0).mean().sqrt().item()
    assert measured == pytest.approx(math.sqrt(stationary_variance(PUBLISHED, replicas, kappa)), rel=0.02)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("replicas", [4, 5])
def test_the_predicted_way_to_the_spread_is_the_production_steps_too(replicas: int) -> None:
    for rounds in (1, 2, 4, 8):
        generator = torch.Generator().manual_seed(rounds)
        measured = (
            pairs_at_random(replicas, 0.1, 20_000, rounds, generator).var(1, correction=0).mean().item()
        )
        sigma = np.zeros((2, 2))
        for _ in range(rounds):
            sigma = covariance_recursion(sigma, PUBLISHED, replicas, 0.1)
        assert measured == pytest.approx(sigma[0, 0], rel=0.04)
