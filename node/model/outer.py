"""The NoLoCo outer step: how a replica's slow weights move after a round, and how far replicas drift apart.

Source: Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large Models",
arXiv 2506.10911. For replica i with slow weights φ_i, fast weights θ_i, outer momentum δ_i and an averaging
group g (itself and its partner; itself alone at worst; everyone in DiLoCo), Δ = θ − φ:

    δ_i ← α·δ_i + β·mean_g(Δ) + γ·(mean_g(φ) − φ_i)        (1)
    φ_i ← φ_i + δ_i                                        (2)
    θ_i ← φ_i                                              (3)

Regrouped, (1) needs the mean of a single tensor, so partners exchange one tensor and not two:

    z_i = β·θ_i + (γ − β)·φ_i                              (4)
    δ_i ← α·δ_i + mean_g(z) − γ·φ_i                        (5)

The paper calls it a modified Nesterov momentum; in form it is a heavy ball. γ = 0 with one group of all
replicas and equal φ is DiLoCo's outer step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.codecs.kernels import Floats, compiled

logger = logging.getLogger(__name__)

Matrix: TypeAlias = NDArray[np.floating[Any]]
PROBE = 2**10  # entries that a compiled pass is tried on; it serves all sizes


@dataclass(frozen=True)
class OuterSettings:
    """α: memory of the outer momentum, β: gain on the group's progress, γ: pull toward the group's mean φ.

    ρ² is how much of the square of a pair's distance the codec puts back (`protocol.codecs.near_codecs.kept_apart`).
    """

    alpha: float
    beta: float
    gamma: float
    kept_apart: float = 0.0


@torch.no_grad()
def contribution(theta: Tensor, phi: Tensor, settings: OuterSettings) -> Tensor:
    """z = β·θ + (γ − β)·φ, eq. (4): a new tensor of φ's type, what a replica gives to its partner.

    θ and φ have one shape on one device; θ may be of a lower precision.
    """
    z = theta.to(phi.dtype) * settings.beta
    if settings.gamma != settings.beta:
        z.add_(phi, alpha=settings.gamma - settings.beta)
    return z


@torch.no_grad()
def outer_step(phi: Tensor, delta: Tensor, mean_z: Tensor, settings: OuterSettings) -> None:
    """Take eq. (5) and (2) in place on φ and δ; the caller then copies φ to θ, eq. (3).

    `mean_z` is the mean over the group, oneself included; one's own z alone is a group of one. All have one
    shape and type on one device and are contiguous; `mean_z` is left unchanged. Nothing of the tensors' size is
    allocated. Every member of the group must be given the same mean, codec losses included, or the members'
    means drift.
    """
    if phi.device.type == "cpu":
        slow, momentum, mean = (tensor.view(-1).numpy() for tensor in (phi, delta, mean_z))
        number = slow.dtype.type
        _outer_step_loop(slow, momentum, mean, number(settings.alpha), number(settings.gamma))
        return
    torch.add(mean_z, delta, alpha=settings.alpha, out=delta)
    phi.add_(delta.sub_(phi, alpha=settings.gamma))


@torch.no_grad()
def outer_step_at_once(
    phi: Tensor,
    delta: Tensor,
    theta: Tensor,
    added: Tensor | None,
    weights: tuple[float, float, float],
    compiles: bool = True,
) -> None:
    """δ ← a·δ + b·θ + c·φ + `added`, then eq. (2) and (3), in place, in one launch where it is and can be compiled.

    With `added` ½(ẑ_j − ẑ_i), see `Pull`, that is eq. (5) of a pair for (a, b, c) = (α, β, −β), without it of a group
    of one; with the group's mean of z it is for (α, 0, −γ). All are float32 [parameters] on one device; nothing of
    that size is allocated.
    """
    fused = fused_on(phi.device) if compiles else None
    if fused is None:
        _outer_pass_in_place(phi, delta, theta, added, *weights)
        return
    numbers = torch.tensor(weights, device=phi.device)
    _call(fused, phi, delta, theta, numbers.new_zeros(()) if added is None else added, numbers)


# of φ, δ, θ, what is added, and the weights
OuterPass: TypeAlias = Callable[..., None]


@cache
def fused_on(device: torch.device) -> OuterPass | None:
    """The outer pass, compiled for this kind of device on the first call, which takes some seconds.

    None where it cannot be compiled, which is told. `load_fused` makes the rest of what rounds call.
    """
    compiled_pass: OuterPass = torch.compile(_outer_pass, dynamic=True)
    try:
        _try(compiled_pass, device, offset=0)
    except Exception as error:  # noqa: BLE001  whatever a compiler says: it goes without
        logger.warning("The outer step is not compiled here (%s): it takes longer.", type(error).__name__)
        return None
    return compiled_pass


def load_fused(device: torch.device, has_fragments: bool) -> None:
    """Compile all that rounds will call, before any waits: `has_fragments` of tensors, most of which begin inside."""
    fused = fused_on(device)
    if fused is not None and has_fragments:
        _try(fused, device, offset=PROBE // 2)


@torch.no_grad()  # as in a round: in another mode of gradients torch would compile it once more there
def _try(compiled_pass: OuterPass, device: torch.device, offset: int) -> None:
    """Run the pass on tensors that begin at `offset` of their memory, as torch makes code for those that begin at 0
    and for others.
    """
    phi, delta, theta = (torch.zeros(offset + PROBE, device=device)[offset:] for _ in range(3))
    weights = torch.zeros(3, device=device)
    _call(compiled_pass, phi, delta, theta, torch.zeros(PROBE, device=device), weights)
    _call(compiled_pass, phi, delta, theta, weights.new_zeros(()), weights)


def _call(compiled_pass: OuterPass, *tensors: Tensor) -> None:
    """Call it without what the tensors are views of: for other ones torch would make code once more."""
    compiled_pass(*(tensor.data for tensor in tensors))


def _outer_pass(phi: Tensor, delta: Tensor, theta: Tensor, added: Tensor, weights: Tensor) -> None:
    a, b, c = weights.unbind()
    momentum = a * delta + b * theta + c * phi + added
    delta.copy_(momentum)
    phi.add_(momentum)
    theta.copy_(phi)


def _outer_pass_in_place(
    phi: Tensor, delta: Tensor, theta: Tensor, added: Tensor | None, a: float, b: float, c: float
) -> None:
    """Take the outer step in a pass for each operation, without further memory."""
    delta.mul_(a).add_(theta, alpha=b).add_(phi, alpha=c)
    if added is not None:
        delta.add_(added)
    theta.copy_(phi.add_(delta))


@torch.no_grad()
def add_weighted(target: Tensor, first: Tensor, a: float, second: Tensor, b: float) -> Tensor:
    """target ← target + a·first + b·second, in one pass where there is a compiled one. Returns `target`."""
    if target.device.type != "cpu":
        return target.add_(first, alpha=a).add_(second, alpha=b)
    sum_, one, other = (tensor.view(-1).numpy() for tensor in (target, first, second))
    number = sum_.dtype.type
    _add_weighted_loop(sum_, one, number(a), other, number(b))
    return target


def load_loops() -> None:
    """Compile both loops for float32 now, or read them from disk, rather than in the middle of a round."""
    one, two, three = (np.zeros(1, np.float32) for _ in range(3))
    number = np.float32(1)
    _add_weighted_loop(one, two, number, three, number)
    _outer_step_loop(one, two, three, number, number)


# One pass over contiguous one-dimensional arrays in either precision, unchecked; torch needs one for each operation.


@compiled
def _add_weighted_loop(target: Floats, first: Floats, a: np.float32, second: Floats, b: np.float32) -> None:
    """target ← target + a·first + b·second."""
    for i in range(target.size):
        target[i] += a * first[i] + b * second[i]


@compiled
def _outer_step_loop(
    phi: Floats, delta: Floats, mean_z: Floats, alpha: np.float32, gamma: np.float32
) -> None:
    """δ ← αδ + mean − γφ, φ ← φ + δ."""
    for i in range(phi.size):
        slow = phi[i]
        momentum = mean_z[i] + alpha * delta[i] - gamma * slow
        delta[i] = momentum
        phi[i] = slow + momentum


def covariance_recursion(
    sigma: Matrix,
    settings: OuterSettings,
    replicas: int | None = None,
    kappa: float = 0.0,
    noise_variance: float = 1.0,
) -> Matrix:
    """One round of Σ, the covariance [2, 2] of (φ, δ) over the replicas, under uniformly random pairs.

    The model of a round's progress is θ − φ = −κφ + ξ with ξ independent per replica and round, of variance
    s² = `noise_variance`: inner steps pull toward an optimum and scatter around it. A member's deviation is
    its pair's deviation from the mean of all, which M_S moves, plus its own from its pair's, which M_D moves:

        Σ' = (N−2)/(2(N−1))·M_S Σ M_Sᵀ + N/(2(N−1))·M_D Σ M_Dᵀ + β²s²·(N−2)/(2N)·ones(2,2)
        M_S = [[1−βκ, α], [−βκ, α]],  M_D = [[1−γ, α], [−γ, α]]

    With an odd N a uniformly random replica is alone in each round: it keeps all of its deviation, which M_S
    moves, and all of its noise, so the three weights become 1/2, 1/2 and (N−1)/(2N).

    A codec that rounds by what a pair differs by (κ = 0 here) adds ρ² of a quarter of E(z_i − z_j)² to each of the
    two means, with opposite signs: ρ²·(γ²·N/(2(N−1))·Var φ + β²s²/2)·ones(2,2), the noise by (N−1)/N where N is odd.

    `replicas` is N, at least 1; None stands for the limit of many. Σ sums squares over N, not N − 1.
    Raises `ValueError` for fewer.
    """
    between, within, noise = _pair_weights(replicas)
    across, inside = _pair_matrices(settings, kappa)
    pairs = 1.0 if replicas is None or replicas % 2 == 0 else (replicas - 1) / replicas
    rounding = settings.kept_apart * settings.gamma**2 * within * sigma[0, 0]
    scatter = settings.beta**2 * noise_variance * (noise + settings.kept_apart * pairs / 2)
    floor = (scatter + rounding) * np.ones((2, 2))
    after: Matrix = between * across @ sigma @ across.T + within * inside @ sigma @ inside.T + floor
    return after


def stationary_covariance(
    settings: OuterSettings, replicas: int | None = None, kappa: float = 0.0, noise_variance: float = 1.0
) -> Matrix:
    """The fixed point Σ of `covariance_recursion`; infinite everywhere when the settings are unstable."""
    between, within, _ = _pair_weights(replicas)
    across, inside = _pair_matrices(settings, kappa)
    operator = between * np.kron(across, across) + within * np.kron(inside, inside)
    operator[:, 0] += settings.kept_apart * settings.gamma**2 * within
    if np.abs(np.linalg.eigvals(operator)).max() >= 1:
        return np.full((2, 2), math.inf)
    floor = covariance_recursion(np.zeros((2, 2)), settings, replicas, kappa, noise_variance)
    return np.linalg.solve(np.eye(4) - operator, floor.reshape(4)).reshape(2, 2)


def stationary_variance(
    settings: OuterSettings, replicas: int | None = None, kappa: float = 0.0, noise_variance: float = 1.0
) -> float:
    """Var(φ) over replicas, per parameter, long after the start; the replica spread is its square root.

    For many replicas and κ = 0 it is β²s²(1+α) / (γ(2(1−α²) − γ)). Infinite when the settings are unstable.
    """
    return float(stationary_covariance(settings, replicas, kappa, noise_variance)[0, 0])


def _pair_weights(replicas: int | None) -> tuple[float, float, float]:
    """Weights of M_S, of M_D and of the noise in the recursion.

    Of the variance, N/(2(N−1)) lies within random pairs: a quarter of E(x_i − x_j)², which is 2N/(N−1) times the
    variance. With an odd N the pairs hold (N−1)/N of the replicas, the lone one's deviation counts as between.
    """
    if replicas is None:
        return 0.5, 0.5, 0.5
    n = replicas
    if n < 1:
        raise ValueError(f"replicas are counted from 1, not {n}")
    if n % 2:
        return 0.5, 0.5, (n - 1) / (2 * n)
    return (n - 2) / (2 * (n - 1)), n / (2 * (n - 1)), (n - 2) / (2 * n)


def _pair_matrices(settings: OuterSettings, kappa: float) -> tuple[Matrix, Matrix]:
    pull = settings.beta * kappa
    across = np.array([[1 - pull, settings.alpha], [-pull, settings.alpha]])
    inside = np.array([[1 - settings.gamma, settings.alpha], [-settings.gamma, settings.alpha]])
    return across, inside
