"""Receipts: what others have signed for counts, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bootstrap.export.checkpoint import markdown_text
from node.giving import ledger as ledger_module
from node.giving.ledger import ContributionLedger
from protocol.errors import WireError
from protocol.messages.peers import ReceiptList
from protocol.records.identity import Identity
from protocol.records.receipts import Receipt, added_up, shown_name, signed_receipt

RUN = "run"
MOST = 10**9, 10**6
ANN, BOB, CAROL = (Identity.from_seed(name) for name in ("ann", "bob", "carol"))


def receipt(
    worker: Identity, signer: Identity, tokens: int, rounds: int = 0, name: str = "", run: str = RUN
) -> Receipt:
    return signed_receipt(run, worker.peer_id, signer.peer_id, (tokens, rounds), name, signer.sign)


def test_receipts_of_different_signers_add_up_and_the_largest_of_one_counts() -> None:
    found = added_up(
        RUN,
        [
            receipt(ANN, BOB, 100),
            receipt(ANN, BOB, 300, 2),
            receipt(ANN, CAROL, 50),
            receipt(BOB, ANN, 20, name="bob"),
        ],
        MOST,
    )
    assert [(one.peer, one.name, one.tokens, one.rounds, one.signers) for one in found] == [
        (ANN.peer_id, "", 350, 2, 2),
        (BOB.peer_id, "bob", 20, 0, 1),
    ]


def test_who_lies_about_himself_is_not_believed() -> None:
    honest, million = receipt(ANN, BOB, 100), 10**6
    lies = [
        honest._replace(tokens=million),  # more than was signed
        honest._replace(worker=CAROL.peer_id),  # somebody else's
        receipt(ANN, ANN, million),  # signed by himself
        Receipt(ANN.peer_id, BOB.peer_id, million, 0, "", ANN.sign(b"anything")),  # in another's name
        receipt(ANN, BOB, million, run="another run"),
        honest._replace(name="the founder"),
    ]
    assert not any(lie.is_genuine(RUN) for lie in lies)
    [found] = added_up(RUN, [*lies, honest], MOST)
    assert (found.peer, found.tokens, found.name) == (ANN.peer_id, 100, "")


def test_what_comes_over_the_wire_is_bounded() -> None:
    entry = list(receipt(ANN, BOB, 1))
    assert ReceiptList.parsed({"receipts": [entry]}).receipts[0].is_genuine(RUN)
    for place, wrong in ((0, "nobody"), (2, -1), (3, 2**64), (4, "x" * 33), (5, b"short")):
        with pytest.raises(WireError):
            ReceiptList.parsed({"receipts": [[*entry[:place], wrong, *entry[place + 1 :]]]})
    with pytest.raises(WireError):
        ReceiptList.parsed({"receipts": [entry] * 257})


def test_a_ledger_goes_on_after_a_restart_and_a_damaged_one_begins_anew(tmp_path: Path) -> None:
    path, ledger = tmp_path / "contribution.json", ContributionLedger()
    ledger.note_tokens(ANN.peer_id, 512)
    ledger.note_round(ANN.peer_id)
    ledger.keep(receipt(BOB, CAROL, 70))
    first = ledger.signed(RUN, ANN.peer_id, BOB.peer_id, BOB.sign, "ann")
    path.write_text(ledger.as_json(), encoding="utf-8")
    later = ContributionLedger.read(path)
    later.note_tokens(ANN.peer_id, 512)
    second = later.signed(RUN, ANN.peer_id, BOB.peer_id, BOB.sign)
    assert first is not None
    assert second is not None
    assert (first.tokens, second.tokens, second.rounds, second.name) == (512, 1024, 1, "ann")
    assert second.is_genuine(RUN)
    assert later.tokens == 70
    for damage in ("", "{}", '{"had": 3, "receipts": []}', '{"had": {}, "receipts": [[1]]}'):
        path.write_text(damage, encoding="utf-8")
        assert not ContributionLedger.read(path).had


def test_many_peers_cost_a_bounded_memory_and_push_out_whoever_did_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger_module, "MOST_PEERS", 10)
    ledger = ContributionLedger()
    ledger.note_tokens(ANN.peer_id, 10_000)
    for number in range(50):
        ledger.note_tokens(Identity.from_seed("many", number).peer_id, 1)
    for number in range(600):
        ledger.note_given(Identity.from_seed("many", number % 300).peer_id)
    assert len(ledger.had) == 10
    assert ledger.had[ANN.peer_id].tokens == 10_000
    assert len(ledger.owing) == ledger_module.MOST_OWING


def test_one_signer_lifts_nobody_above_those_for_whom_several_signed() -> None:
    """Before: two friends with a receipt of 2^63 − 1 were first, and all others had a share of 0.0 %."""
    friend, liar = Identity.from_seed("friend"), Identity.from_seed("liar")
    huge = receipt(friend, liar, 2**63 - 1, 2**63 - 1)
    honest = [
        receipt(ANN, BOB, 100, 1),
        receipt(ANN, CAROL, 80, 1),
        receipt(BOB, ANN, 90),
        receipt(BOB, CAROL, 90),
    ]
    found = added_up(RUN, [huge, *honest], (1_000, 10))
    assert [one.peer for one in found] == [BOB.peer_id, ANN.peer_id, friend.peer_id]
    assert (found[-1].tokens, found[-1].rounds) == (1_000, 10)


def test_receipts_of_huge_numbers_push_nobody_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ledger_module, "MOST_PEERS", 10)
    ledger, path = ContributionLedger(), tmp_path / "contribution.json"
    for signer in (BOB, CAROL):
        ledger.note_given(signer.peer_id, 5_000)
        ledger.keep(receipt(ANN, signer, 4_000))
    for number in range(30):
        liar = Identity.from_seed("liar", number)
        ledger.note_given(liar.peer_id, 1)
        ledger.keep(receipt(ANN, liar, 2**63 - 1, 2**63 - 1))
        path.write_text(ledger.as_json(), encoding="utf-8")
        ledger = ContributionLedger.read(path)
    assert len(ledger.receipts) == 10
    assert {BOB.peer_id, CAROL.peer_id} <= set(ledger.receipts)
    first = sorted(ledger.receipts.values(), key=ledger.worth, reverse=True)[:2]
    assert {one.signer for one in first} == {BOB.peer_id, CAROL.peer_id}


def test_a_ledger_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    path, ledger = tmp_path / "contribution.json", ContributionLedger()
    ledger.keep(receipt(ANN, CAROL, 70))
    saved = json.loads(ledger.as_json())
    del saved["given"]
    path.write_text(json.dumps(saved), encoding="utf-8")
    read = ContributionLedger.read(path)
    assert [read.worth(one) for one in read.receipts.values()] == [70]


def test_a_name_is_only_text_wherever_it_is_shown() -> None:
    assert shown_name("\x1b[31mred\nline") == "\\x1b[31mred line"
    assert (
        markdown_text("[x](http://e.vil) <b>|")
        == "&#91;x&#93;&#40;http&#58;&#47;&#47;e&#46;vil&#41; &#60;b&#62;&#124;"
    )
