"""Keeps the owner's list of revocations current, and ends all dealings with those whom it names.

The list is in the DHT, and members ask one another for it: whichever is quicker. It is the owner's signature that
counts, whoever handed it on.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from node.membership.discovery import DHT_DEADLINE
from protocol.access.admission import Admission
from protocol.access.revocations import revoked_key
from protocol.errors import NodeFailed, NolocoError, RecordError, Refused
from protocol.ground import PeerId
from protocol.messages.peers import GetRevoked, Hello, Revoked
from protocol.records.records import MAX_LIFETIME
from protocol.rpc.door import STRANGER
from protocol.rpc.rpc import Answer, Request, Rpc

logger = logging.getLogger(__name__)

PAUSE = 15.0  # between two looks: what is revoked is to be over everywhere within a minute
ASK_DEADLINE = 5.0
MOST_READ = 64  # records of one look
COPIES = 3  # in the DHT: peers that hold records leave, and a record lives for an hour only


class Revoking:
    """Keeps the list of revoked tokens and peers up to date and acts on it."""

    def __init__(
        self,
        rpc: Rpc,
        admission: Admission,
        others: Callable[[], Sequence[PeerId]],
        rng: random.Random,
        gone: Callable[[Sequence[PeerId]], None] = lambda peers: None,
        kept: Callable[[bytes], bytes] = lambda sealed: b"",
    ) -> None:
        """`others` are members to ask, `gone` is called with those who may not be here any more. `kept` keeps the
        last list for the next start, and says what list there is otherwise.
        """
        self._rpc = rpc
        self._admission = admission
        self._others = others
        self._rng = rng
        self._gone = gone
        self._kept = kept
        rpc.handle(GetRevoked.answered_by(self._on_get))

    async def _on_get(self, request: Request[GetRevoked]) -> Answer[Revoked]:
        is_news = self._admission.revoked.issued > request.message.issued
        return Answer(Revoked(sealed=self._admission.sealed if is_news else b""))

    async def run(self, ended: Callable[[NodeFailed], None]) -> None:
        """Look for ever. `ended` is called with the reason once this peer itself may not be here any more."""
        while True:
            try:
                await self.look()
            except NolocoError as problem:
                logger.debug("Revocations: %s", problem)
            try:
                self._admission.check(self._admission.me, self._admission.own, takes_part=True)
            except RecordError as over:
                ended(
                    NodeFailed(
                        f"This node may not be in the run any more: {over}. Ask its owner for another token."
                    )
                )
                return
            await asyncio.sleep(PAUSE)

    async def look(self) -> None:
        """Look in the DHT, and ask one other member. Takes `DHT_DEADLINE` and `ASK_DEADLINE`, twice, at most."""
        admission, transport = self._admission, self._rpc.transport
        key = revoked_key(admission.run_id)
        records = await transport.get(key, DHT_DEADLINE)
        for sealed in {self._kept(admission.sealed), *(record.value for record in records[:MOST_READ])}:
            self._adopt(sealed)
        await self._ask_another()
        self._kept(admission.sealed)
        gone = admission.shut_out()
        self._gone(gone)
        for peer in gone:
            await self._rpc.shut_out(peer)
        now = transport.now()
        copies = [r for r in records if r.value == admission.sealed and r.expires > now + MAX_LIFETIME / 2]
        if admission.sealed and len(copies) < COPIES:
            await transport.put(key, admission.sealed, MAX_LIFETIME, DHT_DEADLINE)

    async def _ask_another(self) -> None:
        others = self._others()
        if not others:
            return
        try:
            self._adopt(await self._told_by(self._rng.choice(others)))
        except NolocoError as problem:
            logger.debug("A member does not tell its revocations: %s", problem)

    async def _told_by(self, other: PeerId) -> bytes:
        """Ask a member for its list; of one that refuses this peer, as if revoked, the greeting tells. Raises as
        `Rpc.call`.
        """
        asks = GetRevoked(issued=self._admission.revoked.issued)
        try:
            answer, _ = await self._rpc.call(other, asks, deadline=ASK_DEADLINE)
        except Refused as refusal:
            if refusal.code != STRANGER:
                raise
        else:
            return answer.sealed
        welcome, _ = await self._rpc.call(other, Hello(), deadline=ASK_DEADLINE)
        return welcome.revoked

    def _adopt(self, sealed: bytes) -> None:
        try:
            if sealed and self._admission.adopt(sealed):
                count = len(self._admission.revoked.entries)
                logger.info("The run's owner has revoked %d invitations or peers.", count)
        except RecordError as error:
            logger.debug("Ignoring a list of revocations: %s", error)
