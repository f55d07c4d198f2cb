"""The mean-square stability bound of the NoLoCo outer step under random grouping.

Derived for the model θ − φ = −κφ + ξ with independent ξ per replica and round; see docs/noloco.md.
"""


def gamma_bound(alpha: float, group_size: int = 2) -> float:
    """The pull γ must stay below this for the replicas' spread to stay bounded.

    2n(1 − α²) / (n(1 − α) + 2α) for groups of n replicas out of many; for pairs it is 2(1 − α²).
    """
    n = group_size
    return 2 * n * (1 - alpha**2) / (n * (1 - alpha) + 2 * alpha)
