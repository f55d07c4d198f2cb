"""The moves of a simulated peer to another stage, as `node.membership.moving`, whose decisions it calls."""

from __future__ import annotations

from collections.abc import Iterator

from bootstrap.lab.simulated_swarm.modelled_dht import look_bytes
from bootstrap.lab.simulated_swarm.modelled_joining import download
from bootstrap.lab.simulated_swarm.swarm_peer import RUN_ID, SwarmPeer
from node.membership.capacity import Move, MovePatience, Peer, next_move, peers_of, surveyed
from node.membership.moving import LONGEST_CLAIM, PATIENCE, PAUSES, REST, SETTLE_SECONDS, pause_before_look
from node.membership.view import Member, View
from protocol.records.announcement import Announcement, moving_key


def moving(peer: SwarmPeer) -> Iterator[float]:
    """Move when it is due: yields the seconds to wait; ends with the peer's service at this stage."""
    world, stage = peer.world, peer.stage
    lifetime = world.scenario.run.record_lifetime
    patience, known = MovePatience(PATIENCE * lifetime), world.scenario.count
    while True:
        yield pause_before_look(known, lifetime) * peer.rng.uniform(*PAUSES)
        if not peer.serves or peer.stage != stage:
            return
        peers = _survey(peer, range(stage - 1, stage + 2))
        known = len(peers)
        rested = world.now - REST * lifetime
        move = next_move(peers, world.work, {}, rested)
        if not patience.is_over(move, bool(_claims(peer)), world.now):
            continue
        if move is None or move.peer != peer.peer:
            continue
        _claim(peer)
        mine = (world.now, peer.peer)
        yield SETTLE_SECONDS
        if not peer.serves:
            return
        others = min(((m.announcement.since, m.peer) for m in _claims(peer)), default=mine)
        again = next_move(_survey(peer), world.work, {}, rested, peer.peer) if mine <= others else None
        if again is not None and again.target == move.target and peer.serves:
            yield from _move(peer, again)
            return
        _withdraw(peer)


def _survey(peer: SwarmPeer, watched: range = range(0)) -> list[Peer]:
    world, view, peers = peer.world, View(peer.world.queue.clock), list[Peer]()
    for stage in world.stages:
        if stage not in watched:
            peer.look(stage, view)
        peers += peers_of(peer.view if stage in watched else view, stage, world.now)
    return surveyed(peers) if any(p.peer == peer.peer for p in peers) else []


def _claims(peer: SwarmPeer) -> list[Member]:
    found = peer.world.dht.get(peer, moving_key(RUN_ID))
    peer.world.measures.looked_up(look_bytes(len(found)))
    return [m for m in found if m.peer != peer.peer and m.announcement.state == "joining"]


def _claim(peer: SwarmPeer, lifetime: float = LONGEST_CLAIM) -> None:
    """Claim a move; a claim that is withdrawn ends at once."""
    now = peer.world.now
    said = Announcement(stage=peer.stage, state="joining", since=now, addresses=[peer.address])
    peer.world.dht.put(peer, moving_key(RUN_ID), Member(peer.peer, said, now + lifetime))


def _withdraw(peer: SwarmPeer) -> None:
    _claim(peer, 0.0)


def _move(peer: SwarmPeer, move: Move) -> Iterator[float]:
    world = peer.world
    if world.measures.counts:
        world.measures.moves += 1
    world.measures.log(world.now, "moves", peer.peer, f"{move.source} to {move.target}")
    peer.announce("leaving")
    peer.leave_stage()
    peer.stage, peer.since = move.target, world.now
    peer.announce("joining")
    yield from download(peer)
    _withdraw(peer)
