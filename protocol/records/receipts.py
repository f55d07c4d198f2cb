"""Receipts for what one peer has had from another in a run, under the signature of the one who had it.

Nobody can write a receipt for himself. What a signature does not prevent is that two peers of one owner sign for each
other; see docs/security.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field

from protocol.errors import RecordError, legible
from protocol.ground import Natural, PeerId
from protocol.records.forgiving import open_ended
from protocol.records.identity import PeerIdText, public_key_of, verify

NAME_CHARACTERS = 32
_DOMAIN = b"noloco receipt v1\0"

Name = Annotated[str, Field(max_length=NAME_CHARACTERS)]


@open_ended
class Receipt(NamedTuple):
    """A receipt, counted since the two met first, over all their lives. Travels as an array."""

    worker: PeerIdText
    signer: PeerIdText
    tokens: (
        Natural  # of microbatches that the worker carried through its stage for the signer, or drew for it
    )
    rounds: Natural  # in which the two averaged
    name: Name  # what the worker calls itself; the signer only repeats it
    signature: Annotated[bytes, Field(min_length=64, max_length=64)]

    def is_genuine(self, run_id: str) -> bool:
        """Return whether the signer has signed it for this run, and for another than itself."""
        try:
            key = public_key_of(self.signer)
        except RecordError:
            return False
        return self.worker != self.signer and verify(key, _signed(run_id, self), self.signature)


def signed_receipt(
    run_id: str,
    worker: PeerId,
    signer: PeerId,
    work: tuple[int, int],
    name: str,
    sign: Callable[[bytes], bytes],
) -> Receipt:
    """A receipt for `work`, tokens and rounds. `sign` is with the signer's key."""
    receipt = Receipt(worker, signer, *work, name, bytes(64))
    return receipt._replace(signature=sign(_signed(run_id, receipt)))


def _signed(run_id: str, receipt: Receipt) -> bytes:
    """The bytes that are signed: each variable part is preceded by its length, as in `protocol.records.records`."""
    texts = [text.encode() for text in (run_id, receipt.worker, receipt.signer, receipt.name)]
    lengths = struct.pack(">IIIIQQ", *map(len, texts), receipt.tokens, receipt.rounds)
    return b"".join((_DOMAIN, lengths, *texts))


@dataclass(frozen=True)
class Contribution:
    """The work that others have signed for one peer."""

    peer: PeerId
    name: str
    tokens: int
    rounds: int
    signers: int
    others_tokens: int = 0  # without those of the one who signed for most


def added_up(run_id: str, receipts: Iterable[Receipt], most: tuple[int, int]) -> list[Contribution]:
    """Add up receipts. Of several of the same two the largest counts, and only what is genuine.

    `most`: the tokens and rounds that one signer can have had in the run; what is more counts as that. In order of
    what is left without the one who signed for most, so that a single signer lifts nobody above others.
    """
    best: dict[tuple[str, str], Receipt] = {}
    for receipt in receipts:
        pair = receipt.worker, receipt.signer
        known = best.get(pair)
        is_more = known is None or (receipt.tokens, receipt.rounds) > (known.tokens, known.rounds)
        if is_more and receipt.is_genuine(run_id):
            best[pair] = receipt
    by_worker: dict[str, list[Receipt]] = {}
    for receipt in best.values():
        by_worker.setdefault(receipt.worker, []).append(receipt)
    found = [_contribution(PeerId(worker), signed, most) for worker, signed in by_worker.items()]
    return sorted(found, key=lambda one: (-one.others_tokens, -one.tokens, -one.rounds, one.peer))


def _contribution(worker: PeerId, signed: list[Receipt], most: tuple[int, int]) -> Contribution:
    """Add up a worker's receipts under the name that most of its work was signed with."""
    signed = [
        receipt._replace(tokens=min(receipt.tokens, most[0]), rounds=min(receipt.rounds, most[1]))
        for receipt in signed
    ]
    weights: dict[str, int] = {}
    for receipt in signed:
        weights[receipt.name] = weights.get(receipt.name, 0) + receipt.tokens + receipt.rounds
    name = max(weights, key=lambda name: (weights[name], name))
    tokens, rounds = sum(r.tokens for r in signed), sum(r.rounds for r in signed)
    without_largest = tokens - max(r.tokens for r in signed)
    return Contribution(worker, shown_name(name), tokens, rounds, len(signed), without_largest)


def shown_name(name: str) -> str:
    """Make a name, whatever it contains, fit on one line of a terminal."""
    return " ".join(legible(name).split())[:NAME_CHARACTERS]
