"""The plan of the run's owner, as far as this node has seen it: reading, checking, passing on."""

from __future__ import annotations

import logging

from node.membership.discovery import DHT_DEADLINE
from node.watch.events import Events
from protocol.errors import RecordError
from protocol.placement_plan import PlacementPlan, open_plan, plan_key
from protocol.records import MAX_LIFETIME
from protocol.signed_manifest import SignedManifest
from protocol.transport.base import Record, Transport

logger = logging.getLogger(__name__)

COPIES = 3  # of a plan in the DHT: peers that hold records leave, and a record lives for an hour only
REFRESH = MAX_LIFETIME / 2  # a copy that is gone sooner is no copy to count on
MOST_READ = 256  # records of one look: anybody can put something under the key


class OwnersPlan:
    """Mutable state: the newest plan that was valid when it was read, its bytes, and what was ignored.

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
        """None when there is no plan, or no more."""
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
