"""`noloco contributors`: who has given how much to a run, by what others have signed for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape

from bootstrap.display import plain_table
from bootstrap.inspect.observer import ASKED_AT_ONCE, Observer, Sighting, visit
from node.machine.processes import in_background
from node.watch.words import print_wrapped
from protocol.errors import NolocoError
from protocol.ground import PeerId
from protocol.messages.peers import GetReceipts
from protocol.records.receipts import Contribution, Receipt, added_up
from protocol.run.manifest import Manifest
from protocol.supervision import all_of

DEADLINE = 10.0


async def contributions(observer: Observer, sightings: Sequence[Sighting]) -> list[Contribution]:
    """Contributions of present and former members, as far as somebody among those seen has a receipt, or signs
    one.

    A member that does not answer within `DEADLINE` seconds is left out. Signatures are checked in a thread: a member
    may send 256 of them.
    """
    slots = asyncio.Semaphore(ASKED_AT_ONCE)

    async def ask(peer: PeerId) -> list[Receipt]:
        async with slots:
            try:
                reply, _ = await observer.rpc.call(peer, GetReceipts(), deadline=DEADLINE)
            except NolocoError:  # gone, or of an older version
                return []
            return list(reply.receipts)

    told = await all_of(*(ask(sighting.member.peer) for sighting in sightings))
    receipts = [receipt for receipts in told for receipt in receipts]
    most = most_work(observer.manifest)
    return await in_background("receipts", added_up, observer.signed.run_id, receipts, most)


def most_work(manifest: Manifest) -> tuple[int, int]:
    """The tokens and rounds that one replica can have had from another: its steps, each way, and its rounds."""
    steps = manifest.inner.total_steps
    tokens = 2 * steps * manifest.inner.microbatches * manifest.tokens_per_microbatch
    return tokens, steps // manifest.outer.inner_steps + 1


async def show_contributors(join: Sequence[str], token: str, as_json: bool) -> None:
    """Print who gave how much to a run. Raises as `visit`."""
    async with visit(join, token) as observer:
        found = await contributions(observer, await observer.survey())
        if as_json:
            print(json.dumps([asdict(one) for one in found], indent=2))
            return
        total = sum(one.tokens for one in found) or 1
        headings = ("who", "peer", "tokens", "share", "rounds shared", "signed by")
        table = plain_table(
            f"contributions to run '{observer.manifest.name}'", headings, left=("who", "peer")
        )
        for one in found:
            counts = f"{one.tokens:,}", f"{one.tokens / total:.1%}", f"{one.rounds:,}", f"{one.signers:,}"
            table.add_row(escape(one.name) or "-", f"…{one.peer[-8:]}", *counts)
        Console(markup=False).print(table)
        if not found:
            print_wrapped(
                "Nobody has signed for anything yet: receipts are there a minute after training has begun."
            )
