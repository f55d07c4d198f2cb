"""One member as pages and metrics see it, from its signed record and its answers. Pure.

All of it is what a stranger says: only numbers, peer ids that were checked, one word of a few, and a name that is
bounded and legible.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict, get_args

from bootstrap.inspect.observer import Sighting
from node.watch.words import LONGEST_NAME, word
from protocol.ground import PeerId
from protocol.messages.peers import NodeStats
from protocol.records.announcement import State

MOST_TARGETS = 8  # peers that a row names as those it sends to
STATES = get_args(State)


class Row(TypedDict):
    """A member as JSON. Rates are per second; `silent` is since when it has not answered (wall clock), else None."""

    id: str
    name: str  # its volunteer's for it, often empty
    stage: int
    state: str
    step: int
    round: int
    loss: float | None
    rate: float  # tokens
    tokens: int
    partner: str  # of the last round; "" when it was alone
    pairs: int
    queue: int
    busy: float | None
    spread: float | None
    expected: float | None
    resends: int
    gossip: int  # bytes sent for averaging
    passed_on: int  # bytes, between others that cannot dial each other
    uptime: float
    silent: float | None
    to: dict[str, float]  # microbatches sent to a peer, since the answer before


def row_of(sighting: Sighting, silent: float | None, to: Mapping[str, float]) -> Row:
    record, peer = sighting.member.announcement, sighting.member.peer
    stats = sighting.stats or NodeStats(
        stage=record.stage,
        state=record.state,
        step=record.step,
        round=record.round,
        loss=record.loss,
        tokens_per_second=record.tokens_per_second,
    )
    return Row(
        id=peer,
        name=word(record.name, LONGEST_NAME),
        stage=record.stage,  # one that the run has, whatever an answer says
        state=stats.state if stats.state in STATES else "unknown",
        step=stats.step,
        round=stats.round,
        loss=stats.loss,
        rate=round(max(0.0, stats.tokens_per_second), 3),
        tokens=stats.tokens,
        partner=stats.partner,
        pairs=stats.pair_averagings,
        queue=stats.queue,
        busy=stats.recent_compute_fraction,
        spread=stats.spread,
        expected=stats.expected_spread,
        resends=stats.resends,
        gossip=stats.gossip_bytes,
        passed_on=stats.passed_on,
        uptime=round(stats.uptime, 1),
        silent=silent,
        to=dict(to),
    )


def sent_per_second(before: NodeStats | None, now: NodeStats, seconds: float) -> dict[str, float]:
    """Microbatches a second to each of the peers that got most, between two answers; empty without an earlier one."""
    if before is None or seconds <= 0:
        return {}
    sent = {peer: count - before.sent.get(peer, 0) for peer, count in now.sent.items()}
    busiest = sorted((peer for peer, count in sent.items() if count > 0), key=lambda peer: -sent[peer])
    return {peer: round(sent[peer] / seconds, 3) for peer in busiest[:MOST_TARGETS]}


def asked_next(asked: Mapping[PeerId, float], now: float, pause: float, most: int) -> list[PeerId]:
    """The peers to ask at `now`: those asked `pause` seconds ago or longer, the longest ago first, `most` at once."""
    due = sorted((when, peer) for peer, when in asked.items() if now - when >= pause)
    return [peer for _, peer in due[:most]]
