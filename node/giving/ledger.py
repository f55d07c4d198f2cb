"""A ledger of work done: what this node has had from others, which it signs for, and what others signed for it.

Kept in the state directory, over all lives of the node.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.access.peer_limits import PeerTable
from protocol.files.keeping import small_json
from protocol.ground import PeerId
from protocol.records.identity import is_peer_id
from protocol.records.receipts import NAME_CHARACTERS, Receipt, signed_receipt
from protocol.windows import counted, window

logger = logging.getLogger(__name__)

MOST_PEERS = 4_096  # of each kind; whoever did least makes room
MOST_OWING = 256


@dataclass
class Had:
    """The work that this node has had from one peer.

    Mutable state: what was had from one peer, and the name that it goes by.
    """

    tokens: int = 0
    rounds: int = 0
    name: str = ""


class ContributionLedger:
    """Keeps account of work done for this node and by it, and the signed receipts for it.

    Mutable state: what was had from each peer and given to it, the receipts of others, and who owes this node one.
    """

    def __init__(self) -> None:
        self.had = dict[PeerId, Had]()
        self.receipts = dict[PeerId, Receipt]()  # by signer
        self.owing = PeerTable[None](MOST_OWING)  # in order
        self.given = Counter[
            PeerId
        ]()  # tokens that this node has carried or drawn for each, by its own count

    @window
    def __repr__(self) -> str:
        receipts = f"{len(self.receipts)} | Owing: {len(self.owing)}"
        return f"Had: from {counted(len(self.had), 'peer')} | Receipts: {receipts}"

    # --- as it happens ------------------------------------------------------------------------

    def note_tokens(self, worker: PeerId, tokens: int) -> None:
        """Note that a peer has carried so many tokens through its stage for this one, or has drawn them."""
        self._of(worker).tokens += tokens

    def note_round(self, partner: PeerId) -> None:
        """Note that the two have averaged: each for the other."""
        self._of(partner).rounds += 1
        self.note_given(partner)

    def note_given(self, peer: PeerId, tokens: int = 0) -> None:
        """Note that something was done for this peer, which is to sign for it."""
        self.owing.setdefault(peer, None)
        self.given[peer] += tokens
        if len(self.given) > MOST_PEERS:
            del self.given[min(self.given, key=lambda one: self.given[one])]

    def _of(self, peer: PeerId) -> Had:
        if peer not in self.had and len(self.had) >= MOST_PEERS:
            del self.had[min(self.had, key=lambda one: (self.had[one].tokens, self.had[one].rounds))]
        return self.had.setdefault(peer, Had())

    # --- signing and being signed for -----------------------------------------------------------

    def signed(
        self,
        run_id: str,
        worker: PeerId,
        signer: PeerId,
        sign: Callable[[bytes], bytes],
        name: str | None = None,
    ) -> Receipt | None:
        """A receipt for what a peer did, under a new name if one is given; None when it did nothing."""
        had = self.had.get(worker)
        if had is None:
            return None
        if name is not None:
            had.name = name
        return signed_receipt(run_id, worker, signer, (had.tokens, had.rounds), had.name, sign)

    def largest(self, most: int) -> list[PeerId]:
        """The peers from which the most was had."""
        return sorted(self.had, key=lambda peer: (-self.had[peer].tokens, -self.had[peer].rounds, peer))[
            :most
        ]

    def keep(self, receipt: Receipt) -> None:
        """Keep a receipt, which must be genuine and for this node; an older one of the same signer goes."""
        known = self.receipts.get(PeerId(receipt.signer))
        if known is None or (known.tokens, known.rounds) <= (receipt.tokens, receipt.rounds):
            self.receipts[PeerId(receipt.signer)] = receipt
        if len(self.receipts) > MOST_PEERS:
            del self.receipts[min(self.receipts, key=lambda one: self.worth(self.receipts[one]))]

    def worth(self, receipt: Receipt) -> int:
        """The tokens of a receipt that this node's own count bears out: no number pushes out other receipts."""
        return min(receipt.tokens, self.given[PeerId(receipt.signer)])

    @property
    def tokens(self) -> int:
        """The tokens that others have signed for."""
        return sum(receipt.tokens for receipt in self.receipts.values())

    # --- on disk --------------------------------------------------------------------------------

    def as_json(self) -> str:
        had = {peer: [one.tokens, one.rounds, one.name] for peer, one in self.had.items()}
        receipts = [[*receipt[:-1], receipt.signature.hex()] for receipt in self.receipts.values()]
        return json.dumps({"had": had, "receipts": receipts, "given": self.given})

    @classmethod
    def read(cls, path: Path) -> ContributionLedger:
        """Read a ledger without those entries that cannot be; an empty one for a file that is missing or damaged.

        What is left out is told.
        """
        ledger = cls()
        if not path.exists():
            return ledger
        saved = small_json(path)
        had, receipts, given = (
            (saved.get(name) for name in ("had", "receipts", "given"))
            if isinstance(saved, dict)
            else (None,) * 3
        )
        if not (isinstance(had, dict) and isinstance(receipts, list)):
            logger.warning("%s is damaged: who did how much for this node is counted anew.", path)
            return ledger
        wrong = 0
        for peer, entry in [*had.items()][:MOST_PEERS]:
            try:
                ledger.had[PeerId(peer)] = _had(peer, *entry[:3])  # a later version's may say more
            except (ValueError, TypeError):
                wrong += 1
        kept = []
        for entry in receipts[:MOST_PEERS]:
            try:
                kept.append(_receipt(entry))
            except (ValueError, TypeError):
                wrong += 1
        if not isinstance(given, dict):  # an earlier version's file does not have it
            given = {receipt.signer: receipt.tokens for receipt in kept}
        for peer, tokens in [*given.items()][:MOST_PEERS]:
            try:
                ledger.given[PeerId(peer)] = _had(peer, tokens, 0, "").tokens
            except ValueError:
                wrong += 1
        for receipt in kept:
            ledger.keep(receipt)
        if wrong:
            logger.warning("%s is damaged: %d of its entries cannot be, and are left out.", path, wrong)
        return ledger


def _had(peer: str, tokens: object, rounds: object, name: object) -> Had:
    if not is_peer_id(peer):
        raise ValueError(f"{peer!r} is no peer")
    return Had(_count(tokens), _count(rounds), str(name)[:NAME_CHARACTERS])


def _receipt(entry: Sequence[object]) -> Receipt:
    worker, signer, tokens, rounds, name, signature = entry[:6]
    if not (is_peer_id(str(worker)) and is_peer_id(str(signer))):
        raise ValueError("a receipt between what are no peers")
    name, signature = str(name)[:NAME_CHARACTERS], bytes.fromhex(str(signature))
    return Receipt(str(worker), str(signer), _count(tokens), _count(rounds), name, signature)


def _count(number: object) -> int:
    """A count of tokens or rounds, which goes into a receipt in 64 bits. Raises `ValueError` for what is none."""
    if not isinstance(number, int) or not 0 <= number < 2**63:
        raise ValueError("no such number was counted")
    return number
