"""The world around a newcomer: the records, links and claims of its way to a stage (`placement`)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager

from node.config import NodeConfig
from node.links.probing import Visitor
from node.membership.capacity import Capacities, Peer, peers_of, surveyed
from node.membership.discovery import DHT_DEADLINE, Renewal, read_stages
from node.membership.hearsay import hear_from_several
from node.membership.joining import silent
from node.membership.ledger import MOST_OF_NETWORK
from node.membership.membership import Membership
from node.membership.moving import OwnersPlan
from node.membership.placement import LOOKS, NEWCOMERS_SETTLE, Choice
from node.membership.stage_choice import Arrival, LinkTable, Volumes, excess_seconds
from node.model.stage import parameter_count, work_of
from protocol.codecs.codec import nbytes_of
from protocol.errors import JoinError, RecordError
from protocol.ground import PeerId
from protocol.records.addresses import network_of
from protocol.records.announcement import Announcement, State, joining_key, record_key
from protocol.run.manifest import Manifest
from protocol.supervision import all_of

INTENTION_LIFETIME = 30.0  # more than choosing takes; who dies while it chooses is asked whether it lives
VISITED_AT_ONCE = 4  # more would share this machine's uplink and measure that
VISITS_DEADLINE = 10.0


class Newcomer:
    """Chooses the stage that a newcomer takes, and announces that until it serves.

    The claim is renewed until `let_go`: whoever looks while this node still makes its parts must see it.
    """

    def __init__(self, membership: Membership, plan: OwnersPlan, may_serve: Collection[int]) -> None:
        signed = membership.signed
        self._transport = membership.transport
        self._rpc = membership.rpc
        self._run_id = signed.run_id
        self._manifest = signed.manifest
        self._view = membership.view
        self._links = membership.links
        self._plan = plan
        self._may_serve = sorted(may_serve) or list(range(signed.manifest.stages))
        self._events = membership.events
        self._work = [work_of(signed.manifest, stage) for stage in range(signed.manifest.stages)]
        # its own, so that joining does not change what the node draws elsewhere
        self._rng = random.Random(f"{signed.run_id}/{self._transport.peer_id}/stage")
        self._dead: set[PeerId] = set()
        self._alive: set[PeerId] = set()
        self._claim: Announcement | None = None
        self._renewal = Renewal(
            "renewing the claim to a stage", self._put_claim, membership.lifetime, membership.supervisor
        )

    async def choose(self) -> int:
        """Return the stage that the owner's plan has for this node, or the one that the swarm needs most.

        Takes some seconds: those that start together have to see each other. The claim stands until `let_go`.
        """
        stage = await self.planned()
        if stage is None:
            return await Choice(
                self._transport.peer_id, self._work, self._may_serve, self._rng, self
            ).choose()
        self._events.say(f"Taking stage {stage}, as the run's owner has planned.", "chose-stage", stage=stage)
        await self.claim_stage(stage)
        return stage

    async def planned(self) -> int | None:
        """The stage in the owner's plan, if there is one that this machine can serve."""
        plan, me = await self._plan.read(), self._transport.peer_id
        stage = plan.places([me]).get(me) if plan is not None else None
        return stage if stage in self._may_serve else None

    # --- the world around a choice, see `AroundNewcomer` ----------------------------------------

    def elapsed(self) -> float:
        return asyncio.get_running_loop().time()

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def announce_intention(self) -> Arrival:
        now = self._transport.now()
        intention = Announcement(
            stage=0, state="joining", since=now, addresses=self._transport.addresses()[:8]
        )
        key = joining_key(self._run_id)
        await self._transport.put(key, intention.to_bytes(), INTENTION_LIFETIME, DHT_DEADLINE)
        return now, self._transport.peer_id

    async def read_newcomers(self) -> list[Arrival]:
        """Read who else is joining: of each network those that came first, or all where there is only one network."""
        found: dict[str, list[Arrival]] = {}
        for record in await self._transport.get(joining_key(self._run_id), DHT_DEADLINE):
            try:
                peer, announcement = record.subkey, Announcement.read(record)
            except RecordError:
                continue
            found.setdefault(network_of(announcement.addresses), []).append((announcement.since, peer))
        most = MOST_OF_NETWORK if len(found) > 1 else None
        return [arrival for arrivals in found.values() for arrival in sorted(arrivals)[:most]]

    async def survey_living(self) -> list[Peer]:
        """All others that serve, or have claimed, a stage and answer."""
        stages, peers = range(self._manifest.stages), list[Peer]()
        await read_stages(self._transport, self._run_id, stages, self._view)
        now = self._transport.now()
        for stage in stages:
            peers += [p for p in peers_of(self._view, stage, now) if p.peer != self._transport.peer_id]
        dead = await self.ask_whether_alive([p.peer for p in peers])
        return surveyed(p for p in peers if p.peer not in dead)

    async def ask_whether_alive(self, peers: Sequence[PeerId]) -> set[PeerId]:
        """Ask the peers that were not asked yet whether they live: a record outlives its peer by its lifetime."""
        unknown = [p for p in peers if p not in self._dead | self._alive and p != self._transport.peer_id]
        dead = await silent(self._rpc, unknown)
        self._dead |= dead
        self._alive |= set(unknown) - dead
        return self._dead

    async def measure_links(self, peers: Sequence[PeerId]) -> None:
        """Measure the links to these, `VISITS_DEADLINE` in all: what was not measured by then makes no difference."""
        visitor, slots = Visitor(self._rpc, self._links, self._rng), asyncio.Semaphore(VISITED_AT_ONCE)

        async def visit(peer: PeerId) -> None:
            async with slots:
                await visitor.visit(peer)

        try:
            async with asyncio.timeout(VISITS_DEADLINE):
                await all_of(*(visit(peer) for peer in peers))
        except TimeoutError:
            self._events.emit("visits-cut-short", peers=len(peers))

    def excess(self, peers: Sequence[Peer]) -> dict[int, float]:
        """The excess of each stage that it may serve, see `excess_seconds`; empty when no own link is known."""
        me, table = self._transport.peer_id, LinkTable()
        own = self._links.told()
        if not own:
            return {}
        table.add(me, own)
        for stage in range(self._manifest.stages):
            for member in self._view.members(stage, self._transport.now()):
                table.add(member.peer, member.announcement.links)
        stages, volumes = range(self._manifest.stages), volumes_of(self._manifest)
        members = {stage: [p.peer for p in peers if p.stage == stage] for stage in stages}
        return {stage: excess_seconds(me, members, table, volumes, stage) for stage in self._may_serve}

    async def claim_stage(self, stage: int, instead_of: int | None = None) -> float:
        """Claim the stage; again, as a later claim, when that takes longer to store than others wait to see it."""
        if instead_of is not None:
            self._make_claim(instead_of, "leaving")
            await self._put_claim()
            self._events.say(
                f"Others came to stage {instead_of}, too; taking stage {stage}.", "chose-stage", stage=stage
            )
        for _ in range(LOOKS):
            began = self.elapsed()
            claim = self._make_claim(stage, "joining")
            await self._put_claim()
            self._renewal.begin()
            if self.elapsed() - began < NEWCOMERS_SETTLE:
                break
        return claim.since

    def _make_claim(self, stage: int, state: State) -> Announcement:
        self._claim = Announcement(
            stage=stage, state=state, since=self._transport.now(), addresses=self._transport.addresses()[:8]
        )
        return self._claim

    async def _put_claim(self) -> None:
        assert self._claim is not None
        lifetime, stage = self._manifest.limits.record_lifetime, self._claim.stage
        level = self._view.level(stage)
        key = record_key(self._run_id, stage, self._transport.peer_id, level)
        claim = self._claim.model_copy(update={"level": level})
        await self._transport.put(key, claim.to_bytes(), lifetime, DHT_DEADLINE)

    async def let_go(self) -> None:
        """Stop renewing the claim: this node's own record takes its place, or it ends after a record's lifetime."""
        await self._renewal.end()

    def report_choice(
        self, stage: int, peers: Sequence[Peer], rivals: int, excess: Mapping[int, float]
    ) -> None:
        found = Capacities(peers, self._work)
        counts = ", ".join(
            f"stage {s} has {f'{count:.0f}' if count else 'nobody'}" for s, count in enumerate(found.replicas)
        )
        silent = f" {len(self._dead)} of those announced do not answer." if self._dead else ""
        met = f" Newcomers that choose, too: {rivals}." if rivals else ""
        near = f" Its links make a step {excess[stage]:+.3f} s longer." if excess else ""
        self._events.say(
            f"Taking stage {stage}, which needs this node most: {counts}.{silent}{met}{near}",
            "chose-stage",
            stage=stage,
            dead=sorted(self._dead),
        )


@asynccontextmanager
async def found_stage(
    config: NodeConfig,
    membership: Membership,
    plan: OwnersPlan,
    may_serve: Collection[int],
    previous: int | None,
) -> AsyncIterator[int]:
    """The stage asked for, the one planned, the one served before, or the one that the run needs most.

    A stage that was chosen is claimed until the context ends. `may_serve`: the stages that this machine can hold.
    Raises `JoinError` for a stage that does not exist.
    """
    stages = membership.signed.manifest.stages
    if config.stage >= stages:
        raise JoinError(
            f"This run has stages 0 to {stages - 1}; --stage {config.stage} does not exist. Choose one of them."
        )
    await read_stages(membership.transport, membership.run_id, range(stages), membership.view)
    await hear_from_several(membership)
    if config.stage >= 0:
        yield config.stage
    elif previous is not None:
        yield previous
    else:
        newcomer = Newcomer(membership, plan, may_serve)
        membership.events.begin("choosing a stage")
        try:
            yield await newcomer.choose()
        finally:
            await newcomer.let_go()


def volumes_of(manifest: Manifest) -> Volumes:
    """The volumes of the run; the largest stage gives the bytes of a round."""
    parameters = max(parameter_count(manifest, stage) for stage in range(manifest.stages))
    activations = (manifest.inner.sequences, manifest.data.sequence_tokens, manifest.model.hidden_size)
    return Volumes(
        activations=nbytes_of(manifest.wire.activations, activations),
        exchange=nbytes_of(manifest.wire.gossip, [-(-parameters // manifest.outer.fragments)]),
        microbatches=manifest.inner.microbatches,
        inner_steps=manifest.outer.inner_steps,
    )
