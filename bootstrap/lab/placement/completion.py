"""Links that nobody measured, estimated from those that were.

Latency, as in Vivaldi (Dabek et al., SIGCOMM 2004): every device has a place in a space of few dimensions and a
height, its way to the backbone; the latency of i and j is |x_i − x_j| + h_i + h_j. Bandwidth: log β of i and j is
what i and j add, each for its own access, plus a curve of their latency, for long ways are slow ones. Both are
fitted to the measured pairs in the logarithm, so that near pairs count as far ones, and then corrected by what the
measured pairs nearby are off. What that is worth on hidden pairs: docs/placement.md.
"""

from __future__ import annotations

import numpy as np

from bootstrap.lab.placement.kernels import Floats, Integers
from node.machine.limits import optional

minimize = optional("scipy.optimize", "lab").minimize

DIMENSIONS = 5  # 3 and 7 do as well
FLOOR = 1e-5  # seconds: below it latencies are equal to us
STARTS = 4  # of the fit of places, which has local minima
TERMS = 3  # of the polynomial in log latency
RIDGE = 0.3  # pull of places and heights to the middle
NEAR = 0.05  # quantile of latency that counts as near
DOUBT = 0.5  # what "no correction" counts, in measured pairs


def complete_latency(latency: Floats) -> Floats:
    """Return `latency` [N, N] in seconds, symmetric, with NaN, unknown, replaced by estimates. The diagonal is 0."""
    if not np.isnan(latency).any():
        return latency
    pairs = np.nonzero(np.triu(~np.isnan(latency), 1))
    measured = np.log(np.maximum(latency[pairs], FLOOR))
    count = len(latency)
    scale = float(np.exp(np.median(measured)))
    starts = np.random.default_rng(0).normal(size=(STARTS, count, DIMENSIONS + 1))
    starts[..., -1] = -1.0
    fits = [
        minimize(
            _latency_loss, start.ravel(), (pairs, measured - np.log(scale), count), jac=True,
            method="L-BFGS-B", options={"maxiter": 400},
        )
        for start in starts
    ]  # fmt: skip
    estimate = scale * _distances(min(fits, key=lambda fit: fit.fun).x.reshape(count, -1))
    return _filled(latency, estimate, estimate)


def complete_bandwidth(bandwidth: Floats, latency: Floats) -> Floats:
    """Return `bandwidth` [N, N] in bit/s, symmetric, NaN replaced by estimates; latencies in seconds are complete."""
    if not np.isnan(bandwidth).any():
        return bandwidth
    pairs = np.nonzero(np.triu(~np.isnan(bandwidth), 1))
    measured = np.log(bandwidth[pairs])
    count = len(bandwidth)
    centre = float(measured.mean())
    logs = np.log(np.maximum(latency, FLOOR))
    near = logs[pairs]
    shift, width = near.mean(), max(float(near.std()), 1e-3)
    powers = ((logs - shift) / width)[..., None] ** np.arange(TERMS)
    own = np.zeros((len(measured), count))
    for side in pairs:
        own[np.arange(len(measured)), side] += 1.0
    design = np.hstack([powers[pairs], own])
    penalty = np.r_[np.full(TERMS, 1e-3), np.full(count, 1.0)]
    solved = np.linalg.solve(design.T @ design + np.diag(penalty), design.T @ (measured - centre))
    access = solved[TERMS:]
    estimate = powers @ solved[:TERMS] + access[:, None] + access[None, :]
    return _filled(bandwidth, np.exp(centre + estimate), latency)


def _filled(measured: Floats, estimate: Floats, latency: Floats) -> Floats:
    """Return `measured`, with `estimate`, times what the measured pairs nearby are above theirs, in place of NaN.

    Nearby is a pair that is near i at one end and near j at the other.
    """
    off_diagonal = ~np.eye(len(measured), dtype=bool)
    known = ~np.isnan(measured) & off_diagonal
    above = np.log(np.where(known, measured, 1.0) / np.where(known, np.maximum(estimate, 1e-300), 1.0))
    near = np.exp(-((latency / max(float(np.quantile(latency[off_diagonal], NEAR)), FLOOR)) ** 2))
    np.fill_diagonal(near, 1.0)
    corrected = estimate * np.exp(near @ above @ near / (near @ known @ near + DOUBT))
    filled: Floats = np.where(np.isnan(measured), corrected, measured)
    return filled


def _distances(places: Floats) -> Floats:
    """Distances [N, N] from coordinates and, last, the logarithm of heights [N, D + 1]."""
    apart = places[:, None, :-1] - places[None, :, :-1]
    height = np.exp(places[:, -1])
    distances: Floats = np.sqrt((apart**2).sum(-1) + 1e-6) + height[:, None] + height[None, :]
    return distances


def _latency_loss(
    flat: Floats, pairs: tuple[Integers, ...], measured: Floats, count: int
) -> tuple[float, Floats]:
    """Mean squared error of log latency, with a small pull of places and heights to the middle; and its gradient."""
    places = flat.reshape(count, -1)
    i, j = pairs
    apart = places[i, :-1] - places[j, :-1]
    length = np.sqrt((apart**2).sum(-1) + 1e-6)
    height = np.exp(places[:, -1])
    total = length + height[i] + height[j]
    error = np.log(total) - measured
    slope = 2 * error / total
    gradient = np.zeros_like(places)
    pull = (slope / length)[:, None] * apart
    np.add.at(gradient[:, :-1], i, pull)
    np.add.at(gradient[:, :-1], j, -pull)
    np.add.at(gradient[:, -1], i, slope * height[i])
    np.add.at(gradient[:, -1], j, slope * height[j])
    centred = places[:, -1] - places[:, -1].mean()
    loss = (error**2).sum() + RIDGE * (centred**2).sum() + RIDGE / 10 * (places[:, :-1] ** 2).sum()
    gradient[:, -1] += 2 * RIDGE * centred
    gradient[:, :-1] += RIDGE / 5 * places[:, :-1]
    return float(loss), gradient.ravel()
