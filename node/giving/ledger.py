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

from protocol.ground import PeerId
from protocol.identity import is_peer_id
from protocol.receipts import NAME_CHARACTERS, Receipt, signed_receipt
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
        self.owing = dict[PeerId, None]()  # in order
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
        self.owing[peer] = None
        self.given[peer] += tokens
        if len(self.given) > MOST_PEERS:
            del self.given[min(self.given, key=lambda one: self.given[one])]
        if len(self.owing) > MOST_OWING:
            del self.owing[next(iter(self.owing))]

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
        """Read a ledger; an empty one for a file that is missing or damaged, which is told."""
        ledger = cls()
        if not path.exists():
            return ledger
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            ledger.had = {
                PeerId(peer): _had(*entry) for peer, entry in saved["had"].items() if is_peer_id(peer)
            }
            kept = [_receipt(entry) for entry in saved["receipts"]]
            # an earlier version's file does not have it
            given = saved.get("given", {receipt.signer: receipt.tokens for receipt in kept})
            ledger.given.update(
                {PeerId(peer): int(tokens) for peer, tokens in given.items() if is_peer_id(peer)}
            )
            for receipt in kept:
                ledger.keep(receipt)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            logger.warning("%s is damaged: who did how much for this node is counted anew.", path)
            return cls()
        return ledger


def _had(tokens: int, rounds: int, name: str) -> Had:
    return Had(int(tokens), int(rounds), str(name)[:NAME_CHARACTERS])


def _receipt(entry: Sequence[str | int]) -> Receipt:
    worker, signer, tokens, rounds, name, signature = entry
    return Receipt(
        str(worker), str(signer), int(tokens), int(rounds), str(name), bytes.fromhex(str(signature))
    )
