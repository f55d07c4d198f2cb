"""Receipts travel: a node signs for what it has had, asks others to sign for what they had, and shows both."""

from __future__ import annotations

import asyncio
import logging

from node.giving.ledger import ContributionLedger
from node.service.node_resources import NodeResources
from protocol.errors import NolocoError, Refused, StateError
from protocol.ground import PeerId
from protocol.messages.peers import MOST_RECEIPTS, GetReceipts, ReceiptList, SignReceipt
from protocol.rpc.rpc import Answer, Request
from protocol.supervision import all_of
from protocol.windows import short, window

logger = logging.getLogger(__name__)

COLLECT_SECONDS = 60.0
ASKED_AT_ONCE = 32
DEADLINE = 5.0
MOST_SIGNED = 64  # for one who asks for all: 4 ms of the processor


class Receipts:
    """The receipts of one node, which are in its ledger."""

    def __init__(self, member: NodeResources) -> None:
        self._member = member
        self._ledger: ContributionLedger = member.contributions

    @window
    def __repr__(self) -> str:
        return f"Peer: {short(self._member.transport.peer_id)} | Ledger: {self._ledger!r}"

    def serve(self) -> None:
        """Sign for whoever asks for his own, and show all to anybody, from now on."""
        self._member.rpc.handle(SignReceipt.answered_by(self.on_sign), GetReceipts.answered_by(self.on_get))

    async def on_sign(self, request: Request[SignReceipt]) -> Answer[ReceiptList]:
        member = self._member
        receipt = self._ledger.signed(
            member.signed.run_id,
            request.peer,
            member.transport.peer_id,
            member.transport.sign,
            request.message.name,
        )
        if receipt is None:
            raise Refused("nothing-had", "this node has had nothing from you")
        return Answer(ReceiptList(receipts=[receipt]))

    async def on_get(self, request: Request[GetReceipts]) -> Answer[ReceiptList]:
        """Show the receipts for this node, and after them, signed afresh, those that it gives to others."""
        member, ledger = self._member, self._ledger
        shown = sorted(ledger.receipts.values(), key=lambda receipt: -ledger.worth(receipt))
        shown = shown[: MOST_RECEIPTS - MOST_SIGNED]
        for worker in ledger.largest(MOST_SIGNED):
            given = ledger.signed(
                member.signed.run_id, worker, member.transport.peer_id, member.transport.sign
            )
            shown += [given] if given is not None else []
        return Answer(ReceiptList(receipts=shown))

    async def run(self) -> None:
        """Ask those who owe a receipt, and save, for ever."""
        while True:
            await asyncio.sleep(COLLECT_SECONDS)
            await self.collect()

    async def collect(self) -> None:
        """Ask some of those who owe one. Who does not answer is asked when there is more to sign for."""
        owing = list(self._ledger.owing)[:ASKED_AT_ONCE]
        for peer in owing:
            del self._ledger.owing[peer]
        await all_of(*(self._ask(peer) for peer in owing))
        await asyncio.to_thread(self.save)

    def save(self) -> None:
        state = self._member.surroundings.state
        if state is not None and (self._ledger.had or self._ledger.receipts):
            try:
                state.save_ledger(self._ledger.as_json())
            except StateError as problem:
                logger.warning("%s", problem)

    async def _ask(self, peer: PeerId) -> None:
        member = self._member
        request = SignReceipt(name=member.config.name)
        try:
            reply, _ = await member.rpc.call(peer, request, deadline=DEADLINE)
        except NolocoError as problem:
            logger.debug("No receipt from %s: %s", peer[-8:], problem)
            return
        for receipt in reply.receipts:
            is_ours = receipt.worker == member.transport.peer_id and receipt.signer == peer
            if is_ours and receipt.is_genuine(member.signed.run_id):
                self._ledger.keep(receipt)
