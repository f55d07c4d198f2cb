"""Invitations: what they are signed with, whom they let in, for how long and how often; and work in their place."""

from __future__ import annotations

import math
import random
from typing import Any

import msgpack
import pytest

from protocol.access.admission import Admission
from protocol.access.revocations import MAX_REVOCATIONS_BYTES, MOST_REVOKED, Revocations, mark_of
from protocol.access.tokens import MAX_CREDENTIAL_BYTES, MAX_TOKEN_CHARACTERS, SERIAL_BYTES, Delegation, Token
from protocol.errors import ManifestError, RecordError, TokenError
from protocol.ground import MOST_TIME
from protocol.records.announcement import Announcement, open_announcement, record_key
from protocol.records.identity import Identity
from protocol.records.records import seal_record
from protocol.run.manifest import Access, load_preset, manifest_from
from protocol.run.signed_manifest import SignedManifest

NOW = 1_000_000.0
DAY = 86_400.0
OWNER, ALICE, BOB = Identity.from_seed("owner"), Identity.from_seed("alice"), Identity.from_seed("bob")


def signed(owner: Identity = OWNER, **access: Any) -> SignedManifest:
    rules = Access.model_validate({"private": True, **access})
    return SignedManifest.sign(load_preset("tiny").model_copy(update={"access": rules}), owner)


RUN = signed().run_id


class Clock:
    def __init__(self) -> None:
        self.time = NOW

    def __call__(self) -> float:
        return self.time


def admission(clock: Clock | None = None, **access: Any) -> Admission:
    return Admission(signed(**access), Identity.from_seed("me").peer_id, clock or Clock())


def token(
    uses: int = 1, issuer: Identity = OWNER, run: str = RUN, delegation: Delegation | None = None
) -> Token:
    return Token.issue(run, issuer, delegation, uses, NOW + DAY)


def test_a_token_survives_being_written_down_and_lets_in_whoever_has_it() -> None:
    text = token().to_text()
    shown = Token.from_text(f"  {text}\n").credential(ALICE.peer_id)
    assert len(text) <= MAX_TOKEN_CHARACTERS
    assert len(shown) <= MAX_CREDENTIAL_BYTES
    asked = admission()
    assert not asked.knows(ALICE.peer_id)
    asked.check(ALICE.peer_id, shown)
    assert asked.knows(ALICE.peer_id)
    assert not asked.admits(BOB.peer_id, shown)  # what Alice shows is no use to others


@pytest.mark.parametrize("text", ["", "noloco-", "noloco-???", "hello", "A" * 5_000, "noloco-" + "A" * 200])
def test_what_is_no_token_is_said_to_be_none(text: str) -> None:
    with pytest.raises(TokenError, match="Copy it again"):
        Token.from_text(text)


def test_nobody_else_signs_tokens() -> None:
    stranger = Identity.from_seed("stranger")
    forged = Delegation.sign(stranger, RUN, stranger.public_key, NOW + DAY)
    for bad in (
        token(issuer=stranger),
        token(issuer=stranger, delegation=forged),
        token(run=signed(owner=stranger).run_id),
        token(issuer=stranger, delegation=Delegation.sign(OWNER, "another", stranger.public_key, NOW + DAY)),
    ):
        with pytest.raises(RecordError):
            admission().check(ALICE.peer_id, bad.credential(ALICE.peer_id))


def test_a_delegate_invites_while_the_owner_wants_it() -> None:
    helper, clock = Identity.from_seed("helper"), Clock()
    asked = admission(clock)
    given = Delegation.sign(OWNER, RUN, helper.public_key, NOW + DAY / 2)
    shown = token(issuer=helper, delegation=given).credential(ALICE.peer_id)
    asked.check(ALICE.peer_id, shown)
    clock.time += DAY / 2
    assert not asked.knows(ALICE.peer_id)
    clock.time -= DAY / 2
    assert asked.knows(ALICE.peer_id)
    asked.adopt(Revocations(NOW, frozenset({mark_of(helper.public_key)})).sign(RUN, OWNER))
    assert not asked.knows(ALICE.peer_id)


def test_a_token_ends_with_its_time() -> None:
    clock = Clock()
    asked = admission(clock)
    shown = token().credential(ALICE.peer_id)
    asked.check(ALICE.peer_id, shown)
    clock.time += DAY
    assert not asked.knows(ALICE.peer_id)
    assert asked.shut_out() == [ALICE.peer_id]
    with pytest.raises(RecordError, match="expired"):
        asked.check(ALICE.peer_id, shown)


NO_TIMES = [math.nan, -math.nan, math.inf, -math.inf, -1e308]


@pytest.mark.parametrize("over", [-DAY, DAY], ids=["over", "current"])
@pytest.mark.parametrize("expires", NO_TIMES)
def test_what_ends_at_no_time_lets_nobody_in(expires: float, over: float) -> None:
    """Before: with NaN a delegate whose right was over went on inviting, and its guests stayed for ever."""
    helper = Identity.from_seed("helper")
    given = Delegation.sign(OWNER, RUN, helper.public_key, NOW + over)
    endless = Delegation.sign(OWNER, RUN, helper.public_key, expires)
    for issued in (
        Token.issue(RUN, helper, given, 9, expires),
        Token.issue(RUN, OWNER, None, 9, expires),
        Token.issue(RUN, helper, endless, 9, NOW + DAY),
    ):
        asked = admission()
        assert not asked.admits(ALICE.peer_id, issued.credential(ALICE.peer_id))
        assert not asked.knows(ALICE.peer_id)
        with pytest.raises(TokenError):
            Token.from_text(issued.to_text())


def test_no_far_end_outlives_a_delegates_right() -> None:
    helper, asked = Identity.from_seed("helper"), admission()
    for over, lets_in in ((-DAY, False), (DAY, True)):
        given = Delegation.sign(OWNER, RUN, helper.public_key, NOW + over)
        shown = Token.issue(RUN, helper, given, 9, MOST_TIME).credential(ALICE.peer_id)
        assert asked.admits(ALICE.peer_id, shown) == lets_in


@pytest.mark.parametrize("issued", NO_TIMES)
def test_a_list_of_no_time_is_none(issued: float) -> None:
    """Before: after one of NaN every older list replaced it, and brought back those whom it shut out."""
    asked = admission()
    with pytest.raises(RecordError):
        asked.adopt(Revocations(issued, frozenset()).sign(RUN, OWNER))
    assert asked.adopt(Revocations(NOW, frozenset()).sign(RUN, OWNER))


@pytest.mark.parametrize("expires", [*NO_TIMES, 1e308])
def test_a_record_shown_until_no_time_is_none(expires: float) -> None:
    key = record_key(RUN, 0, ALICE.peer_id, 0)
    value = Announcement(stage=0, state="serving", since=NOW).to_bytes()
    sealed = seal_record(ALICE, key, value, expires)
    with pytest.raises(RecordError):
        open_announcement(RUN, 0, 0, ALICE.peer_id, sealed, expires, NOW)


def test_the_first_peers_that_come_with_a_token_are_those_it_is_for() -> None:
    asked, given = admission(), token(uses=2)
    shown = {peer: given.credential(peer) for peer in (Identity.from_seed(n).peer_id for n in range(3))}
    first, second, third = shown
    for peer in (first, second, first):
        asked.check(peer, shown[peer], takes_part=True)
    with pytest.raises(RecordError, match="have used it"):
        asked.check(third, shown[third], takes_part=True)
    assert asked.admits(second, shown[second])


def test_revoked_tokens_and_peers_are_shut_out_and_an_older_list_brings_nobody_back() -> None:
    asked, given = admission(), token(uses=9)
    for peer in (ALICE.peer_id, BOB.peer_id):
        asked.check(peer, given.credential(peer))
    first = Revocations(NOW, frozenset({mark_of(ALICE.public_key)})).sign(RUN, OWNER)
    assert asked.adopt(first)
    assert not asked.knows(ALICE.peer_id)
    assert asked.knows(BOB.peer_id)
    second = Revocations(NOW + 1, frozenset({given.invitation.serial})).sign(RUN, OWNER)
    assert asked.adopt(second)
    assert not asked.knows(BOB.peer_id)
    assert not asked.adopt(first)
    with pytest.raises(RecordError, match="revoked"):
        asked.check(BOB.peer_id, given.credential(BOB.peer_id))


def test_lists_of_others_and_of_other_runs_are_none_and_a_full_one_fits_its_bound() -> None:
    asked = admission()
    entries = frozenset(n.to_bytes(SERIAL_BYTES, "big") for n in range(MOST_REVOKED))
    full = Revocations(NOW, entries)
    for bad in (
        full.sign(RUN, ALICE),
        full.sign("another", OWNER),
        b"\xc1",
        msgpack.packb([b"x", b"y"]),
        Revocations(NOW, frozenset({b"short"})).sign(RUN, OWNER),
        Revocations(NOW, entries | {b"x" * SERIAL_BYTES}).sign(RUN, OWNER),
    ):
        with pytest.raises(RecordError):
            asked.adopt(bad)
    sealed = full.sign(RUN, OWNER)
    assert len(sealed) <= MAX_REVOCATIONS_BYTES
    assert asked.adopt(sealed)


def test_who_is_on_the_list_needs_no_token() -> None:
    asked = admission(peers=[ALICE.peer_id])
    assert asked.knows(ALICE.peer_id)
    assert asked.admits(ALICE.peer_id, b"")
    assert not asked.admits(BOB.peer_id, b"")


def test_damaged_credentials_raise_nothing_else() -> None:
    asked, rng = admission(), random.Random(1)
    shown = token().credential(ALICE.peer_id)
    for _ in range(2_000):
        damaged = bytearray(shown)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        assert bytes(damaged) == shown or not asked.admits(ALICE.peer_id, bytes(damaged))


@pytest.mark.parametrize(
    ("access", "problem"),
    [
        ({"peers": [ALICE.peer_id]}, "set access.private"),
        ({"private": True, "peers": ["12D3Koo"]}, "not a peer id"),
    ],
)
def test_rules_that_contradict_each_other_are_refused(access: dict[str, object], problem: str) -> None:
    contents = load_preset("tiny").model_dump() | {"access": access}
    with pytest.raises(ManifestError, match=problem):
        manifest_from(contents)
