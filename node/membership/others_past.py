"""Asks other peers what they remember of a run's stages."""

from __future__ import annotations

import logging

from node.membership.hearsay import ASK_DEADLINE
from node.membership.membership import Membership
from protocol.errors import NolocoError
from protocol.ground import PeerId
from protocol.messages.peers import GetPast
from protocol.supervision import all_of

logger = logging.getLogger(__name__)

ASKED = 8  # peers, for what they remember


async def asked_peers(membership: Membership, most: int) -> list[PeerId]:
    """The peers to ask for what they remember or keep: first those that are connected, then other members."""
    transport, view, now = membership.transport, membership.view, membership.transport.now()
    known = [peer for peer, _ in await transport.peers()]
    known += [m.peer for s in range(membership.signed.manifest.stages) for m in view.members(s, now)]
    return [peer for peer in dict.fromkeys(known) if peer != transport.peer_id][:most]


async def ask_of_past(membership: Membership, stage: int) -> None:
    """Ask some peers, the seed peer among them where it is connected, what they remember of a stage.

    Takes `ASK_DEADLINE`. A peer that does not answer by then, or is of an earlier version, remembers nothing.
    """

    async def ask(peer: PeerId) -> None:
        try:
            answer, _ = await membership.rpc.call(peer, GetPast(stages=[stage]), deadline=ASK_DEADLINE)
        except NolocoError as problem:
            logger.debug("Nothing of the past from %s: %s", peer[-8:], problem)
            return
        told = [record for record in answer.records if record.stage == stage]
        membership.past.hear(peer, told, membership.admission)

    await all_of(*map(ask, await asked_peers(membership, ASKED)))
