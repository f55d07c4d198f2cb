"""The world around a member: the records, plan and leases of its moves to other stages (`placement`)."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence

from node.membership.capacity import MovePatience, Peer, peers_of, surveyed
from node.membership.discovery import DHT_DEADLINE, Renewal, read_stage
from node.membership.joining import silent
from node.membership.membership import Membership
from node.membership.placement import MOVERS_SETTLE, PATIENCE, REST, Call, Moves, Survey
from node.membership.stage_choice import Arrival
from node.membership.view import Member, View
from node.model.stage import work_of
from node.watch.events import Events
from protocol.errors import RecordError, UserError
from protocol.ground import PeerId, Record
from protocol.records.announcement import Claim, moving_key
from protocol.records.records import MAX_LIFETIME
from protocol.run.placement_plan import PlacementPlan, open_plan, plan_key
from protocol.run.signed_manifest import SignedManifest
from protocol.transport.base import Transport
from protocol.windows import window

logger = logging.getLogger(__name__)

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
        self._call: Call | None = None
        self._check: Callable[[int], None] = lambda target: None
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

    async def wait_for_call(
        self, stage: int, may_serve: Collection[int], check: Callable[[int], None]
    ) -> int:
        """Return the stage to move to once that is called for; this node then holds the lease.

        `check` raises `UserError` for a stage that this machine cannot serve after all, and takes it out of
        `may_serve`. Whatever fails on the network is tried again at the next look.
        """
        me, self._check = self._transport.peer_id, check
        moves = Moves(me, stage, self._work, may_serve, self._lifetime, self._patience, self._rng, self)
        try:
            self._call = await moves.wait_for_call(self._known)
            return self._call.target
        except asyncio.CancelledError:
            await self.let_go()
            raise

    # --- the world around a move, see `AroundMember` ---------------------------------------------

    def elapsed(self) -> float:
        return asyncio.get_running_loop().time()

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def read_plan(self) -> None:
        await self._plan.read()

    def planned(self, peers: Sequence[Peer]) -> Mapping[PeerId, int]:
        plan = self._plan.current
        return plan.places([p.peer for p in peers]) if plan is not None else {}

    def fits(self, source: int, target: int) -> bool:
        try:
            self._check(target)
        except UserError as problem:
            self._events.warn(f"This node stays at stage {source}: {problem}", "stays", stage=source)
            return False
        return True

    async def survey_all(self, watched: Collection[int] = ()) -> Survey:
        """Read all replicas of the run: none when this node's own record is missing, as then much else may be, too.

        None also when peers have finished: the run is about to end, stage after stage, and nobody is short. The
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
        reliable = surveyed(peers) if knows_me and not is_over else []
        return Survey(reliable, self._known, self._transport.now())

    async def is_still_called(self, source: int, target: int) -> bool:
        """Return whether to move, now that this node has withdrawn: the reason stands and its stage keeps a replica.

        Asks all that could serve either stage whether they live, in `PROBE_DEADLINE` seconds at most.
        """
        left, others = await self._living(source), await self._living(target)
        was_empty = self._call is not None and self._call.was_empty
        return bool(left) and not (was_empty and others)

    async def _living(self, stage: int) -> set[PeerId]:
        """The other replicas that serve the stage by their records, and answer."""
        me, view = self._transport.peer_id, View()
        await read_stage(self._transport, self._run_id, stage, view)
        found = [p.peer for p in peers_of(view, stage, self._transport.now()) if p.is_serving]
        others = [peer for peer in found if peer != me]
        return set(others) - await silent(self._rpc, others)

    async def call_off(self) -> None:
        """Give the lease back: this node stays where it was."""
        await self.withdraw_lease()

    async def has_stand_in(self, stage: int) -> bool:
        """Return whether another serving replica of the stage answers, whatever the records say."""
        others = [p.peer for p in (await self.survey_all()).peers if p.stage == stage and p.is_serving]
        others = [peer for peer in others if peer != self._transport.peer_id]
        return len(await silent(self._rpc, others)) < len(others)

    # --- the lease ----------------------------------------------------------------------------

    async def take_lease(self, source: int, target: int) -> float | None:
        """Announce the move; return its wall-clock time, None where others may not see it in time."""
        self._claim = Claim(since=self._transport.now(), source=source, target=target)
        began = self.elapsed()
        is_stored = await self._put()
        return self._claim.since if is_stored and self.elapsed() - began < MOVERS_SETTLE else None

    def keep_lease(self) -> None:
        self._renewal.begin()

    async def let_go(self) -> None:
        """End the move. The lease stands for up to a record's lifetime more: others see this node by then."""
        await self._renewal.end()

    async def withdraw_lease(self) -> None:
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

    async def read_leases(self, peers: Sequence[Peer]) -> list[Arrival]:
        """Return the leases that stand, of peers that are, or were lately, where they would move from or to."""
        found: list[Arrival] = []
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
                found.append((claim.since, peer))
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
