"""The words of an invitation, and the exchange that proves them."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from itertools import combinations

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from protocol.access.word_exchange import InvitersSide, NewcomersSide
from protocol.access.words import (
    MAX_SEALED_BYTES,
    MESSAGE_BYTES,
    MOST_CHARACTERS,
    PROOF_BYTES,
    are_words,
    draw_words,
    known_words,
    read_words,
)
from protocol.errors import RecordError, TokenError, UserError
from protocol.records.addresses import seed_place
from protocol.records.identity import Identity
from protocol.transport.peer_at import _peer_in

WORDS = "blue-walnut-lamp"
STRANGE_NAME = [("2.5.29.17", bytes.fromhex("3004a3020500"))]  # subjectAltName: an x400Address
TOKEN = "noloco-" + "A" * 400
NEWCOMER, SEED, OTHER = (Identity.from_seed(name).peer_id for name in ("newcomer", "seed", "other"))


def distance(one: str, other: str) -> int:
    """Letters to insert, drop or replace."""
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        above, row = row, [i]
        for j, its in enumerate(other, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (letter != its)))
    return row[-1]


def test_the_words_cannot_be_mistaken_for_each_other() -> None:
    words = known_words()
    assert len(words) == 256
    assert list(words) == sorted(set(words))
    assert all(word.isascii() and word.isalpha() and word.islower() and 4 <= len(word) <= 8 for word in words)
    assert len({word[:3] for word in words}) == len(words)
    assert min(distance(one, other) for one, other in combinations(words, 2)) >= 3


def test_drawn_words_are_read_however_they_are_typed() -> None:
    assert all(read_words(draw_words()) for _ in range(100))
    for typed in ("Blue Walnut Lamp", "BLUE-walnut_lamp", " blue.walnut.lamp "):
        assert are_words(typed)
        assert read_words(typed) == WORDS


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("blue-walnut", "has three words"),
        ("blue-walnut-lamb", "Did you mean 'lamp'"),
        ("blue-xylyxyly-lamp", "Ask for the words again"),
        ("blue-" * 20, "has three words"),
        ("", "has three words"),
    ],
)
def test_a_slip_is_told_before_it_costs_a_try(typed: str, told: str) -> None:
    with pytest.raises(TokenError, match=told):
        read_words(typed)


@given(st.text(max_size=2 * MOST_CHARACTERS))
def test_any_text_is_words_or_is_refused(text: str) -> None:
    with suppress(TokenError):
        assert all(word in known_words() for word in read_words(text).split("-"))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("203.0.113.7", ("203.0.113.7", 31337)),
        ("seed.example.org:4001", ("seed.example.org", 4001)),
        ("[2001:db8::7]:31", ("2001:db8::7", 31)),
        ("[fe80::7%eth0]", ("fe80::7%eth0", 31337)),
        ("bücher.example", ("bücher.example", 31337)),
        ("seed.example.", ("seed.example.", 31337)),
    ],
)
def test_where_the_seed_peer_is(text: str, place: tuple[str, int]) -> None:
    assert seed_place(text) == place


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":31",
        "a:0",
        "a:70000",
        "a:b",
        "a/b",
        "u@a",
        "/ip4/1.2.3.4/tcp/1",
        "x" * 300,
        "seed..org",
        "x" * 64,
    ],
)
def test_a_wrong_place_is_told(text: str) -> None:
    with pytest.raises(UserError, match="--at"):
        seed_place(text)


def test_a_certificate_that_no_peer_has_is_refused() -> None:
    """A duplicate extension, a version that there is not, and a name of a kind that nobody reads."""
    key, nobody, day = Ed25519PrivateKey.generate(), x509.Name([]), datetime(2026, 1, 1)
    builder = x509.CertificateBuilder(nobody, nobody, key.public_key(), 1, day, day)
    for oid, value in (("1.3.6.1.4.1.53594.1.1", b"x"), ("1.3.6.1.4.1.53594.1.2", b"y"), *STRANGE_NAME):
        builder = builder.add_extension(x509.UnrecognizedExtension(x509.ObjectIdentifier(oid), value), False)
    strange = builder.sign(key, None).public_bytes(Encoding.DER)
    twice = strange.replace(b"\x83\xa2\x5a\x01\x02", b"\x83\xa2\x5a\x01\x01")
    of_version_6 = strange.replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x05")
    assert len({strange, twice, of_version_6}) == 3
    for certificate in (strange, twice, of_version_6, b"", None):
        with pytest.raises(RecordError, match="is not a peer's"):
            _peer_in(certificate)


# --- the exchange ---------------------------------------------------------------------------------


def test_who_knows_the_words_gets_the_token() -> None:
    newcomer = NewcomersSide(WORDS, NEWCOMER, SEED)
    inviting = InvitersSide(WORDS, NEWCOMER, SEED, newcomer.message)
    proof = newcomer.proof(inviting.message)
    assert inviting.proves(proof)
    sealed = inviting.sealed(TOKEN)
    assert newcomer.open(sealed) == TOKEN
    assert (len(newcomer.message), len(inviting.message)) == (MESSAGE_BYTES, MESSAGE_BYTES)
    assert (len(proof), len(sealed) <= MAX_SEALED_BYTES) == (PROOF_BYTES, True)


@pytest.mark.parametrize(
    ("words", "newcomer", "seed"),
    [("blue-walnut-lemon", NEWCOMER, SEED), (WORDS, OTHER, SEED), (WORDS, NEWCOMER, OTHER)],
    ids=["other words", "as another newcomer", "through another peer"],
)
def test_whatever_else_the_newcomer_takes_it_for_proves_nothing(words: str, newcomer: str, seed: str) -> None:
    """A peer that passes an exchange on has another id than both think: as with wrong words, neither side is open."""
    trying = NewcomersSide(words, newcomer, seed)  # type: ignore[arg-type]
    inviting = InvitersSide(WORDS, NEWCOMER, SEED, trying.message)
    assert not inviting.proves(trying.proof(inviting.message))
    with pytest.raises(RecordError, match="does not know the words"):
        trying.open(inviting.sealed(TOKEN))


def test_a_listener_that_is_told_the_words_later_opens_nothing() -> None:
    """Neither message depends on the words alone: what was sealed before stays so."""
    newcomer = NewcomersSide(WORDS, NEWCOMER, SEED)
    inviting = InvitersSide(WORDS, NEWCOMER, SEED, newcomer.message)
    heard = [newcomer.message, inviting.message, newcomer.proof(inviting.message), inviting.sealed(TOKEN)]
    assert not any(b"walnut" in part or b"noloco" in part for part in heard)
    listener = NewcomersSide(WORDS, NEWCOMER, SEED)
    assert listener.message != newcomer.message
    assert listener.proof(inviting.message) != heard[2]
    with pytest.raises(RecordError):
        listener.open(heard[3])


def test_a_repeated_proof_proves_nothing_in_the_next_exchange() -> None:
    newcomer = NewcomersSide(WORDS, NEWCOMER, SEED)
    proof = newcomer.proof(InvitersSide(WORDS, NEWCOMER, SEED, newcomer.message).message)
    assert not InvitersSide(WORDS, NEWCOMER, SEED, newcomer.message).proves(proof)


@given(
    st.binary(max_size=MESSAGE_BYTES + 2) | st.binary(min_size=32, max_size=32).map(lambda raw: b"A" + raw)
)
def test_any_bytes_are_a_message_or_are_refused(raw: bytes) -> None:
    try:
        inviting = InvitersSide(WORDS, NEWCOMER, SEED, raw)
    except RecordError:
        return
    assert not inviting.proves(bytes(PROOF_BYTES))


@pytest.mark.parametrize("message", [bytes(32), b"\x01" + bytes(31), (2**255 - 20).to_bytes(32, "little")])
def test_points_with_which_the_key_would_not_depend_on_the_words_are_refused(message: bytes) -> None:
    with pytest.raises(RecordError):
        InvitersSide(WORDS, NEWCOMER, SEED, b"A" + message)
    with pytest.raises(RecordError):
        NewcomersSide(WORDS, NEWCOMER, SEED).proof(b"B" + message)


def test_a_sealed_token_that_was_changed_is_refused() -> None:
    newcomer = NewcomersSide(WORDS, NEWCOMER, SEED)
    inviting = InvitersSide(WORDS, NEWCOMER, SEED, newcomer.message)
    newcomer.proof(inviting.message)
    for sealed in (b"", inviting.sealed(TOKEN)[:-1], inviting.sealed(TOKEN) + b"x"):
        with pytest.raises(RecordError):
            newcomer.open(sealed)
