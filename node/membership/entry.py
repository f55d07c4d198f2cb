"""Into a run that has rules of access: what this peer shows, and what it asks of others from then on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from protocol.access.admission import Admission
from protocol.access.tokens import Token
from protocol.errors import NolocoError, RecordError, Refused, TokenError
from protocol.ground import PeerId
from protocol.messages.peers import Introduce
from protocol.records.announcement import Announcement, stage_key
from protocol.records.records import seal_record
from protocol.rpc.door import Door
from protocol.rpc.rpc import Rpc
from protocol.run.signed_manifest import SignedManifest
from protocol.supervision import all_of

SHOWN_TO = 5  # members, of whom one has to agree
RECORD_SECONDS = 30.0  # of the record that says no more than that a peer is about to take part
SHOWN_DEADLINE = 5.0
MEET_DEADLINE = 15.0  # for meeting the members again, as one of those who may be here


TokenSource: TypeAlias = str | Callable[[Admission], str]  # or what finds it, "" where there is none


async def enter(
    rpc: Rpc,
    signed: SignedManifest,
    revoked: bytes,
    token: TokenSource,
    *,
    takes_part: bool = True,
) -> Admission | None:
    """Show others that this peer may be in the run, and let in nobody who may not; None for a run without rules.

    `revoked` is the owner's list as others gave it; `token` may be looked for once it is known that one is needed. A
    visitor does not take part: it does no work, answers nobody, and does not use the token up. Takes
    `MEET_DEADLINE` and `SHOWN_DEADLINE`. Raises `TokenError` with what to do.
    """
    if not signed.manifest.access.private:
        return None
    transport = rpc.transport
    admission = Admission(signed, transport.peer_id, transport.now)
    with suppress(RecordError):
        admission.adopt(revoked)
    given = token if isinstance(token, str) else token(admission)
    admission.own = credential(admission, given, signed.manifest.name, takes_part=takes_part)
    await guard(rpc, admission)
    if admission.own:
        await _shown_to_a_few(rpc, _introduction(rpc, admission, takes_part=takes_part))
    return admission


def _introduction(rpc: Rpc, admission: Admission, *, takes_part: bool) -> Introduce:
    """What a peer shows first: its credential, and if it is to be a member a signed record, which counts as a use."""
    if not takes_part:
        return Introduce(expires=admission.own_ends, credential=admission.own)
    transport = rpc.transport
    expires = transport.now() + RECORD_SECONDS
    # of the only state that has nobody send it anything; the node's own record takes its place
    record = Announcement(stage=0, state="leaving", since=transport.now()).to_bytes()
    sealed = seal_record(transport, stage_key(admission.run_id, 0), record, expires, admission.own)
    return Introduce(stage=0, record=sealed, expires=expires, credential=admission.own)


async def _shown_to_a_few(rpc: Rpc, shown: Introduce) -> None:
    """Show it to a few members: otherwise nobody tells a peer that its token has been used up.

    Raises `TokenError` when some refuse it and nobody takes it.
    """

    async def show(peer: PeerId) -> Refused | bool:
        try:
            await rpc.call(peer, shown, deadline=SHOWN_DEADLINE)
        except Refused as refused:
            return refused
        except NolocoError:
            return False
        return True

    answers = await all_of(*(show(peer) for peer, _ in (await rpc.transport.peers())[:SHOWN_TO]))
    refusals = [answer for answer in answers if isinstance(answer, Refused)]
    if refusals and True not in answers:
        raise TokenError(f"The members do not let this peer in: {refusals[0].reason}. {_advice(shown)}")


def _advice(shown: Introduce) -> str:
    if shown.record:
        return "Ask the run's owner for a token."
    return "Try again in a minute, or ask the run's owner for a token of your own."


def credential(admission: Admission, token: str, run: str, *, takes_part: bool = True) -> bytes:
    """The credential that this peer shows to a private run; empty if the manifest names it. Raises `TokenError`."""
    if admission.me in admission.rules.peers:
        return b""
    if not token:
        raise TokenError(
            f"Run '{run}' is private: give the token that its owner sent you with --token, or as NOLOCO_TOKEN. "
            "Tools find it by themselves beside a node or a seed peer of the run that you run on this machine."
        )
    shown = Token.from_text(token)
    if shown.run_id != admission.run_id:
        raise TokenError(
            f"The token is for run {shown.run_id}, and this is run {admission.run_id}. "
            "Check --join, or ask the owner of this run for a token."
        )
    own = shown.credential(admission.me)
    try:
        admission.check(admission.me, own, takes_part=takes_part)
    except RecordError as error:
        raise TokenError(f"The token lets nobody in: {error}. Ask the run's owner for another one.") from None
    return own


async def guard(rpc: Rpc, admission: Admission) -> None:
    """Show `admission.own` from now on, and ask others for theirs. Takes `MEET_DEADLINE` at most."""
    transport = rpc.transport

    def no_record(peer: PeerId) -> None:
        return None

    if admission.own:
        rpc.introduction = Introduce(expires=admission.own_ends, credential=admission.own)
    rpc.open_door(Door(admission.run_id, {}, no_record, transport.now, admission=admission))
    await transport.restrict(admission, MEET_DEADLINE)
