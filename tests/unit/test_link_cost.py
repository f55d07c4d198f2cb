"""What a newcomer's links would do to a step, against the same mean hops and exchanges counted by hand."""

from __future__ import annotations

import pytest

from node.membership.stage_choice import LinkTable, Volumes, excess_seconds
from protocol.ground import PeerId
from protocol.records.announcement import LinkReport

VOLUMES = Volumes(activations=1_000, exchange=10_000, microbatches=1, inner_steps=5)
ME = PeerId("1" * 50 + "me")
A, B, C = (PeerId("1" * 50 + name) for name in ("aa", "bb", "cc"))


def report(peer: PeerId, round_trip: float, bandwidth: float | None = 1e5) -> LinkReport:
    return LinkReport(peer[-16:], round_trip, bandwidth)


def test_a_hop_that_is_shorter_than_the_others_makes_the_step_shorter() -> None:
    links = LinkTable()
    links.add(A, [report(B, 0.4)])
    links.add(ME, [report(B, 0.1), report(A, 0.2)])
    members = {0: [A], 1: [B]}
    # hop: 0.05 + 0.01 instead of 0.2 + 0.01, there and back, and this node is one of two
    assert excess_seconds(ME, members, links, VOLUMES, 0) == pytest.approx(2 * (0.06 - 0.21) / 2)
    # from the other side: 0.11 to A instead of 0.21
    assert excess_seconds(ME, members, links, VOLUMES, 1) == pytest.approx(2 * (0.11 - 0.21) / 2)


def test_a_partner_far_away_costs_its_share_of_a_round() -> None:
    links = LinkTable()
    links.add(A, [report(C, 0.02)])
    links.add(ME, [report(A, 0.4), report(C, 0.4)])
    # exchange: 0.2 + 0.1 instead of 0.01 + 0.1, every fifth step, one of three
    assert excess_seconds(ME, {0: [A, C]}, links, VOLUMES, 0) == pytest.approx((0.3 - 0.11) / 5 / 3)


def test_what_nobody_has_measured_makes_no_difference() -> None:
    links = LinkTable()
    links.add(ME, [report(B, 0.1), report(C, 0.1, bandwidth=None)])
    assert excess_seconds(ME, {0: [A], 1: [B], 2: [C]}, links, VOLUMES, 0) == 0.0
    assert excess_seconds(ME, {}, links, VOLUMES, 0) == 0.0


def test_the_worse_of_two_reports_counts() -> None:
    links = LinkTable()
    links.add(A, [report(B, 0.01, 1e9)])
    links.add(B, [report(A, 0.4, 1e5)])
    assert links.seconds(A, B, 1_000) == pytest.approx(0.21)
