"""Into a run that has rules of access: what this peer shows, and what it asks of others from then on."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from protocol.admission import Admission, do_work
from protocol.door import Door
from protocol.errors import NolocoError, RecordError, Refused, TokenError
from protocol.ground import PeerId
from protocol.messages.peers import Introduce
from protocol.rpc import Rpc
from protocol.signed_manifest import SignedManifest
from protocol.tokens import Token

SHOWN_TO = 5  # members, of whom one has to agree
SHOWN_DEADLINE = 5.0
MEET_DEADLINE = 15.0  # for meeting the members again, as one of those who may be here


async def enter(
    rpc: Rpc, signed: SignedManifest, revoked: bytes, token: str, *, takes_part: bool = True
) -> Admission | None:
    """Show others that this peer may be in the run, and let in nobody who may not; None for a run without rules.

    `revoked` is the owner's list as others gave it; who does not `take_part` does no work and answers nobody. Takes
    `MEET_DEADLINE`, and as long as the work of an open run. Raises `TokenError` with what to do.
    """
    if not signed.manifest.access.has_rules:
        return None
    transport, rules = rpc.transport, signed.manifest.access
    admission = Admission(signed, transport.peer_id, transport.now)
    with suppress(RecordError):
        admission.adopt(revoked)
    if rules.private:
        admission.own = credential(admission, token, signed.manifest.name)
    elif takes_part:
        admission.own = await asyncio.to_thread(do_work, signed.run_id, transport.peer_id, rules.work_bits)
    await guard(rpc, admission)
    await _shown_to_a_few(rpc)
    return admission


async def _shown_to_a_few(rpc: Rpc) -> None:
    """Show the credential to a few members: otherwise nobody tells a peer that its token has been used up.

    Raises `TokenError` when all refuse it.
    """
    refusal, shown = None, rpc.introduction
    if shown is None:  # the manifest names this peer, or the run is open
        return
    for peer, _ in (await rpc.transport.peers())[:SHOWN_TO]:
        try:
            await rpc.call(peer, shown, deadline=SHOWN_DEADLINE)
            return
        except Refused as refused:
            refusal = refused
        except NolocoError:
            continue
    if refusal is not None:
        raise TokenError(
            f"The members do not let this peer in: {refusal.reason}. Ask the run's owner for a token."
        )


def credential(admission: Admission, token: str, run: str) -> bytes:
    """The credential that this peer shows to a private run; empty if the manifest names it. Raises `TokenError`."""
    if admission.me in admission.rules.peers:
        return b""
    if not token:
        raise TokenError(
            f"Run '{run}' is private: give the token that its owner sent you with --token, or as NOLOCO_TOKEN."
        )
    shown = Token.from_text(token)
    if shown.run_id != admission.run_id:
        raise TokenError(
            f"The token is for run {shown.run_id}, and this is run {admission.run_id}. "
            "Check --join, or ask the owner of this run for a token."
        )
    own = shown.credential(admission.me)
    try:
        admission.check(admission.me, own)
    except RecordError as error:
        raise TokenError(f"The token lets nobody in: {error}. Ask the run's owner for another one.") from None
    return own


async def guard(rpc: Rpc, admission: Admission) -> None:
    """Show `admission.own` from now on, and ask others for theirs. Takes `MEET_DEADLINE` at most."""
    transport = rpc.transport

    def no_record(peer: PeerId) -> None:
        return None

    if admission.own and admission.is_private:
        rpc.introduction = Introduce(expires=admission.own_ends, credential=admission.own)
    rpc.open_door(Door(admission.run_id, {}, no_record, transport.now, admission=admission))
    await transport.restrict(admission, MEET_DEADLINE)
