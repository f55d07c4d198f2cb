"""Whether what was timed was an average: from a sample of each peer's tensors before and after."""

from __future__ import annotations

from .coordination import Message, PeerFailed

ALPHA, BETA, GAMMA = 0.5, 0.7, 0.7  # the manifest's defaults, which `state.manifest_of` leaves alone
EXACT = 1e-5
QUANTISED = 1e-4  # a tenth of the changes that `noloco_peer` makes to θ


class RoundAlone(PeerFailed):
    """A replica went on alone, as it may: nothing is wrong, but there is nothing to compare either."""


def check_pairs(answers: list[Message], tolerance: float) -> None:
    """Every replica has taken NoLoCo's outer step with its partner. Raises `RoundAlone` or `PeerFailed`."""
    by_name = {answer["me"]: answer for answer in answers}
    for mine in answers:
        partner = by_name.get(mine["partner"])
        if partner is None or partner["partner"] != mine["me"]:
            raise RoundAlone(f"a round ended without its partner: {mine['trouble']}")
        for phi, delta, theta, other_phi, _, other_theta, after in zip(
            *mine["before"], *partner["before"], mine["after"], strict=True
        ):
            progress = (theta - phi + other_theta - other_phi) / 2
            pull = (other_phi - phi) / 2
            expected = phi + ALPHA * delta + BETA * progress + GAMMA * pull
            _require_close(after, expected, tolerance)


def check_allreduce(answers: list[Message], tolerance: float) -> None:
    """Every peer holds the mean of all. Raises `PeerFailed`."""
    for mine in answers:
        if mine["members"] != len(answers):
            raise PeerFailed(f"hivemind averaged {mine['members']} peers, not {len(answers)}")
        for entry, after in enumerate(mine["after"]):
            mean = sum(answer["before"][entry] for answer in answers) / len(answers)
            _require_close(after, mean, tolerance)


def _require_close(value: float, expected: float, tolerance: float) -> None:
    if abs(value - expected) > tolerance * max(1.0, abs(expected)):
        raise PeerFailed(f"a weight is {value:.6f} where the average is {expected:.6f}")
