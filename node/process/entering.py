"""Enters the run: what a node shows of itself, whom it greets, who may not be there any more, and what it needs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from node.links.links import Links
from node.machine.limits import parse_rate
from node.membership.data_source import DataSupply, RunTokenizer
from node.membership.entry import enter
from node.membership.hearsay import serve_records
from node.membership.joining import serve_greeting
from node.membership.membership import Membership
from node.membership.past import Past, serve_past
from node.membership.revoking import Revoking
from node.membership.stage_choice import Abilities
from node.membership.view import View
from node.membership.ways_in import WaysIn, serve_ways
from node.service.node_resources import NodeResources
from node.state.copies import CopyService
from node.state.copy_keeper import CopyKeeper, copies_in
from node.storage.position import Position
from node.storage.state_directory import StateDirectory
from protocol.access.admission import Admission
from protocol.access.revocations import Revocations
from protocol.errors import NodeFailed, RecordError, StateError
from protocol.run.signed_manifest import SignedManifest

logger = logging.getLogger(__name__)

SAVE_SECONDS = 60.0  # between two times that the past of the stages is written down


def kept_revocations(state: StateDirectory, signed: SignedManifest) -> bytes:
    """The owner's list as this node kept it; nothing, which is told, when it is damaged."""
    known = state.revoked()
    if not state.revoked_path.exists():
        return b""
    try:
        Revocations.read(known, signed.run_id, signed.public_key)
    except RecordError as damage:
        logger.warning(
            "The list of revocations that was kept cannot be used (%s); others give it again.", damage
        )
        return b""
    return known


async def enter_run(
    member: NodeResources, signed: SignedManifest, revoked: bytes, end: Callable[[NodeFailed], None]
) -> None:
    """Enter the run, by its rules of access if it has some, and greet others. Raises `TokenError` with what to do.

    From then on `member` has its `Membership`. `revoked` is the owner's list as others gave it; `end` is called when
    this node comes to be on it.
    """
    rpc, state = member.rpc, member.surroundings.state
    token = member.config.token or (state.token() if state is not None else "")
    known = kept_revocations(state, signed) if state is not None else b""
    admission = await enter(rpc, signed, revoked or known, token)
    member.membership = _membership_of(member, signed, admission)
    serve_greeting(
        rpc,
        rpc.transport,
        signed,
        is_seed=False,
        revoked=lambda: admission.sealed if admission is not None else b"",
    )
    if admission is None:
        return
    if state is not None and token:
        state.save_token(token)

    def kept(sealed: bytes) -> bytes:
        return state.revoked(sealed) if state is not None else b""

    view = member.view
    revoking = Revoking(rpc, admission, view.peers, member.random(), view.forget, kept)
    member.supervisor.keep(
        "looking for revocations",
        lambda: revoking.run(end),
        "Who is not to be in the run any more goes on here.",
    )


def _membership_of(member: NodeResources, signed: SignedManifest, admission: Admission | None) -> Membership:
    """The membership of a node that has entered a run, with the past that it kept of the stages."""
    manifest, state = signed.manifest, member.surroundings.state
    past = Past(signed.run_id, manifest.most_steps, manifest.limits.record_lifetime, member.transport.now)
    if state is not None:
        past.take_up(state.past())
    view = View()
    view.noted = past.note
    return Membership(
        member.rpc, signed, view, Links(), member.events, member.supervisor, past, admission, member.contributions
    )  # fmt: skip


def share_past(member: NodeResources) -> None:
    """Give what is remembered of who served which stage to peers that ask, and write it down from time to time."""
    serve_past(member.rpc, member.membership.past)

    async def keep() -> None:
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            await save_past(member)

    consequence = "After a restart it does not know who had which stage."
    member.supervisor.keep("keeping the past of the stages", keep, consequence)


def keep_ways(member: NodeResources) -> None:
    """Stay reachable through others where nobody can dial this node, and pass on what its volunteer allows."""
    rate = member.config.relay_for_others
    member.transport.pass_on(parse_rate(rate) if rate else 0.0)
    serve_ways(member.rpc)
    if not member.config.announce and member.config.relay:
        ways = member.ways = WaysIn(member.rpc, member.events)
        member.supervisor.keep(
            "staying reachable", ways.run, "Whoever cannot dial this node cannot reach it."
        )


def keep_copies(member: NodeResources, is_resting: Callable[[], bool]) -> None:
    """Offer what is on this node's disk of other stages; with `--keep` also fetch copies of all, unless it rests."""
    run_id, state = member.signed.run_id, member.surroundings.state
    directories = [] if state is None else [state]
    if state is not None and member.config.keep:
        keeper = CopyKeeper(member.rpc, member.signed, copies_in(state.path), member.random(), is_resting)
        directories.append(keeper.directory)
        member.supervisor.keep(
            "keeping copies of all stages", keeper.run, "It keeps no copies of other stages."
        )
    member.copies = CopyService(member.rpc, run_id, directories)
    member.copies.serve()


async def save_past(member: NodeResources) -> None:
    """Write down what has been seen of the stages since the last time; a full disk has been reported by others."""
    state = member.surroundings.state
    if state is None or not member.has_entered or not member.membership.past.has_changed:
        return
    with suppress(StateError):
        await asyncio.to_thread(state.save_past, member.membership.past.to_bytes())


def equip(member: NodeResources, position: Position | None, is_resting: Callable[[], bool]) -> None:
    """Give the node its tokenizer, data from `position` on, stages it can serve, and others' records to show."""
    serve_records(member.rpc, member.signed, member.view, member.membership.admission)
    keep_ways(member)
    share_past(member)
    keep_copies(member, is_resting)
    config, manifest, state = member.config, member.signed.manifest, member.surroundings.state
    member.tokenizer = RunTokenizer(member.signed, member.rpc, member.view, state, config.tokenizer)
    member.tokenizer.serve()
    member.data = DataSupply(config, manifest, state, member.events, member.surroundings.corpus)
    member.data.return_to(position)
    member.abilities = Abilities(config, manifest, state, member.data)
