"""Decides when this node moves to another stage: reads the records and the owner's plan, lets `capacity` decide, and
takes the lease.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Sequence

from node.membership.capacity import Move, MovePatience, Peer, next_move, peers_of, surveyed
from node.membership.discovery import DHT_DEADLINE, Renewal, read_stage
from node.membership.joining import silent
from node.membership.membership import Membership
from node.membership.view import Member, View
from node.model.stage import work_of
from node.watch.events import Events
from protocol.errors import NolocoError, RecordError, UserError
from protocol.ground import PeerId, Record
from protocol.records.announcement import Claim, moving_key
from protocol.records.records import MAX_LIFETIME
from protocol.run.placement_plan import PlacementPlan, open_plan, plan_key
from protocol.run.signed_manifest import SignedManifest
from protocol.transport.base import Transport
from protocol.windows import window

logger = logging.getLogger(__name__)

# In record lifetimes. A dead peer's record may stand for one of them, and the next one shows what is left.
PATIENCE = 2.0
REST = 3.0  # what a peer stays where it came to, so that the others' views have settled
PAUSES = (0.4, 0.6)  # between looks; at random, or all would ask at once
SETTLE_SECONDS = 6.0  # for claims of the same moment to be seen by each other: more than `DHT_DEADLINE`
# with more peers, looks are rarer in proportion: a node reads as much in a minute as with so many
PROMPT_PEERS = 50
# seconds: a download that hangs must not keep everyone in place; who joins a stage counts for it
LONGEST_CLAIM = 600.0
CLAIMS_APART = (
    10.0  # times that: as long a network's claims do not count again, or one peer could hold all in place
)
COPIES = 3  # of a plan in the DHT: peers that hold records leave, and a record lives for an hour only
REFRESH = MAX_LIFETIME / 2  # a copy that is gone sooner is no copy to count on
MOST_READ = 256  # records of one look: anybody can put something under the key


class Mover:
    """Decides when this node moves to another stage, and holds the claim that announces it.

    It remembers who was seen lately and when: a mover has withdrawn its record by the time it is needed.
    """

    def __init__(self, membership: Membership, plan: OwnersPlan, rng: random.Random) -> None:
        manifest, lifetime = membership.signed.manifest, membership.lifetime
        self._transport = membership.transport
        self._rpc = membership.rpc
        self._run_id = membership.run_id
        self._lifetime = lifetime
        self._work = [work_of(manifest, stage) for stage in range(manifest.stages)]
        self._plan = plan
        self._view = membership.view
        self._known = 0  # peers, at the last look
        self._was_empty = False  # the stage that this node was called to
        self._events = membership.events
        self._rng = rng
        self._patience = MovePatience(PATIENCE * lifetime)
        self._claim: Claim | None = None
        self._claimed: dict[str, float] = {}
        self._seen: dict[PeerId, tuple[Peer, float]] = {}
        self._renewal = Renewal("renewing the claim to move", self._put, lifetime, membership.supervisor)

    @window
    def __repr__(self) -> str:
        claim = "none" if self._claim is None else f"{self._claim.source} → {self._claim.target}"
        seen = f"{self._known} known, {len(self._seen)} seen lately"
        return f"Claim: {claim} | Networks: {len(self._claimed)} claimed | Peers: {seen}"

    async def wait(self, stage: int, may_serve: Collection[int], check: Callable[[int], None]) -> int:
        """Return the stage to move to once that is called for; this node then holds the lease.

        `check` raises `UserError` for a stage that this machine cannot serve after all, and takes it out of
        `may_serve`. Whatever fails on the network is tried again at the next look.
        """
        try:
            return await self._called(stage, may_serve, check)
        except asyncio.CancelledError:
            await self.let_go()
            raise

    async def _called(self, stage: int, may_serve: Collection[int], check: Callable[[int], None]) -> int:
        while True:
            await asyncio.sleep(pause_before_look(self._known, self._lifetime) * self._rng.uniform(*PAUSES))
            try:
                target = await self._look(stage, may_serve)
                if target is None:
                    continue
                if self._fits(check, stage, target) and await self._is_not_missed(stage):
                    return target
                await self._withdraw()
            except NolocoError as problem:
                logger.debug("Looking whether to move: %s", problem)

    def _fits(self, check: Callable[[int], None], stage: int, target: int) -> bool:
        try:
            check(target)
        except UserError as problem:
            self._events.warn(f"This node stays at stage {stage}: {problem}", "stays", stage=stage)
            return False
        return True

    async def _look(self, stage: int, may_serve: Collection[int]) -> int | None:
        """Look at the records once; the stage to move to if it is this node's turn and the lease is its own."""
        me, now = self._transport.peer_id, self._transport.now
        await self._plan.read()
        peers = await self._survey(watched=range(stage - 1, stage + 2))
        rested = now() - REST * self._lifetime
        move = self._next_move(peers, rested)
        elapsed = asyncio.get_running_loop().time()
        if not self._patience.is_over(move, bool(await self._claims(peers)), elapsed):
            return None
        if move is None or move.peer != me or move.target not in may_serve:
            return None
        if not await self._take_lease(stage, move.target, peers):
            return None
        peers = await self._survey()
        again = self._next_move(peers, rested, only=me)
        self._was_empty = not any(p.stage == move.target and p.is_serving for p in peers)
        if again is not None and again.target == move.target:
            return move.target
        await self._withdraw()
        return None

    def _next_move(self, peers: Sequence[Peer], rested: float, only: PeerId | None = None) -> Move | None:
        plan = self._plan.current
        planned = plan.places([p.peer for p in peers]) if plan is not None else {}
        return next_move(peers, self._work, planned, rested, only)

    async def _survey(self, watched: Collection[int] = ()) -> list[Peer]:
        """All replicas of the run. Empty when this node's own record is missing: then much else may be, too.

        Empty also when peers have finished: the run is about to end, stage after stage, and nobody is short. The
        records of stages that are `watched` are those that the node has read for its own needs.
        """
        view, now = View(), self._transport.now()
        members, peers = list[Member](), list[Peer]()
        for stage in range(len(self._work)):
            if stage not in watched:
                await read_stage(self._transport, self._run_id, stage, view)
            seen = self._view if stage in watched else view
            members += seen.members(stage, now)
            peers += peers_of(seen, stage, now)
        self._known = len(members)
        is_over = any(member.announcement.state == "finished" for member in members)
        knows_me = any(member.peer == self._transport.peer_id for member in members)
        return surveyed(peers) if knows_me and not is_over else []

    async def is_still_called(self, source: int, target: int) -> bool:
        """Return whether to move, now that this node has withdrawn: the reason stands and its stage keeps a replica.

        Asks all that could serve either stage whether they live, in `PROBE_DEADLINE` seconds at most.
        """
        left, others = await self._living(source), await self._living(target)
        return bool(left) and not (self._was_empty and others)

    async def _living(self, stage: int) -> set[PeerId]:
        """The other replicas that serve the stage by their records, and answer."""
        me, view = self._transport.peer_id, View()
        await read_stage(self._transport, self._run_id, stage, view)
        found = [p.peer for p in peers_of(view, stage, self._transport.now()) if p.is_serving]
        others = [peer for peer in found if peer != me]
        return set(others) - await silent(self._rpc, others)

    async def call_off(self) -> None:
        """Give the lease back: this node stays where it was."""
        await self._withdraw()

    async def _is_not_missed(self, stage: int) -> bool:
        """Find out whether another serving replica of the own stage answers, whatever the records say."""
        others = [p.peer for p in await self._survey() if p.stage == stage and p.is_serving]
        others = [peer for peer in others if peer != self._transport.peer_id]
        return len(await silent(self._rpc, others)) < len(others)

    # --- the lease ----------------------------------------------------------------------------

    async def _take_lease(self, source: int, target: int, peers: Sequence[Peer]) -> bool:
        """Claim the move; returns whether this node may make it: its claim stands and no peer's came before it.

        Claims are seen by others before `SETTLE_SECONDS` are over: one that takes longer to store is withdrawn.
        """
        loop = asyncio.get_running_loop()
        self._claim = Claim(since=self._transport.now(), source=source, target=target)
        began = loop.time()
        is_stored = await self._put()
        if is_stored and loop.time() - began < SETTLE_SECONDS:
            await asyncio.sleep(SETTLE_SECONDS)
            mine = (self._claim.since, self._transport.peer_id)
            if all(mine < (claim.since, peer) for peer, claim in await self._claims(peers)):
                self._renewal.begin()
                return True
        await self._withdraw()
        return False

    async def let_go(self) -> None:
        """End the move. The lease stands for up to a record's lifetime more: others see this node by then."""
        await self._renewal.end()

    async def _withdraw(self) -> None:
        """Let others move instead. A claim that cannot be withdrawn ends after a record's lifetime."""
        await self.let_go()
        if self._claim is not None:
            self._claim = self._claim.model_copy(update={"withdrawn": True})
            await self._put()

    async def _put(self) -> bool:
        assert self._claim is not None
        return await self._transport.put(
            moving_key(self._run_id), self._claim.to_bytes(), self._lifetime, DHT_DEADLINE
        )

    async def _claims(self, peers: Sequence[Peer]) -> list[tuple[PeerId, Claim]]:
        """The claims that stand, of peers that are, or were a short time ago, where they would move from or to."""
        found: list[tuple[PeerId, Claim]] = []
        known = self._seen_lately(peers)
        is_one_network = len({p.network for p in peers}) == 1
        for record in await self._transport.get(moving_key(self._run_id), DHT_DEADLINE):
            try:
                peer, claim = record.subkey, Claim.read(record)
            except RecordError as error:
                logger.debug("Ignoring a record: %s", error)
                continue
            is_old = claim.since < self._transport.now() - LONGEST_CLAIM
            if peer == self._transport.peer_id or claim.withdrawn or is_old or peer not in known:
                continue
            is_there = known[peer].stage in (claim.source, claim.target)
            if is_there and self._has_turn(peer if is_one_network else known[peer].network):
                found.append((peer, claim))
        return found

    def _seen_lately(self, peers: Sequence[Peer]) -> dict[PeerId, Peer]:
        """These `peers`, and those whose record was there before they left for a stage where it is not yet."""
        now = self._view.elapsed()
        self._seen |= {p.peer: (p, now) for p in peers}
        longest = REST * self._lifetime
        self._seen = {peer: seen for peer, seen in self._seen.items() if now - seen[1] <= longest}
        return {peer: replica for peer, (replica, _) in self._seen.items()}

    def _has_turn(self, group: str) -> bool:
        """Return whether claims of this network, or peer, count: for `LONGEST_CLAIM` from the first one seen."""
        now = self._view.elapsed()
        over = [known for known, since in self._claimed.items() if now - since > CLAIMS_APART * LONGEST_CLAIM]
        for known in over:
            del self._claimed[known]
        return now - self._claimed.setdefault(group, now) <= LONGEST_CLAIM


def pause_before_look(peers: int, lifetime: float) -> float:
    """Seconds between two looks at the records of so many peers, on average half of this."""
    return lifetime * max(1.0, peers / PROMPT_PEERS)


class OwnersPlan:
    """Reads the placement plan that the run's owner has signed and passes it on.

    What is forged, over or malformed is ignored: a warning tells of the first, `ignored` counts all.
    """

    def __init__(self, transport: Transport, signed: SignedManifest, events: Events) -> None:
        self._transport = transport
        self._signed = signed
        self._events = events
        self._plan: PlacementPlan | None = None
        self._sealed = b""
        self._known_bad: set[bytes] = set()
        self.ignored = 0

    @property
    def current(self) -> PlacementPlan | None:
        """The newest valid plan; None when there is none, or it is over."""
        holds = self._plan is not None and self._plan.expires > self._transport.now()
        return self._plan if holds else None

    async def read(self) -> PlacementPlan | None:
        """Look for a newer one, and keep copies of the newest in the DHT. Deadline: `DHT_DEADLINE`, twice."""
        records = await self._transport.get(plan_key(self._signed.run_id), DHT_DEADLINE)
        for record in records[:MOST_READ]:
            self._consider(record)
        now = self._transport.now()
        lasting = [r for r in records if r.value == self._sealed and r.expires > now + REFRESH]
        if self.current is not None and len(lasting) < COPIES:
            await self._pass_on()
        return self.current

    def _consider(self, record: Record) -> None:
        if record.value == self._sealed or record.value in self._known_bad:
            return
        try:
            plan = open_plan(
                record.value, self._signed.public_key, self._signed.run_id, self._transport.now()
            )
        except RecordError as problem:
            self._ignore(record, problem)
            return
        if self._plan is None or plan.issued > self._plan.issued:
            self._plan, self._sealed = plan, record.value
            if any(plan.stages):
                self._events.say("The run's owner has a plan of who serves which stage.", "plan")

    def _ignore(self, record: Record, problem: RecordError) -> None:
        if len(self._known_bad) < MOST_READ:
            self._known_bad.add(record.value)
        self.ignored += 1
        if self.ignored == 1:
            self._events.warn(
                f"Ignoring a plan from peer …{record.subkey[-8:]}: {problem}.",
                "plan-ignored",
                peer=record.subkey,
            )
        logger.debug("%d plans ignored; the last one: %s", self.ignored, problem)

    async def _pass_on(self) -> None:
        assert self._plan is not None
        lifetime = min(MAX_LIFETIME, self._plan.expires - self._transport.now())
        await self._transport.put(
            plan_key(self._signed.run_id), self._sealed, max(1.0, lifetime), DHT_DEADLINE
        )
