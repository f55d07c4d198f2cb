"""A plan for a running swarm: its nodes as a scenario, which of them would move, and the owner's signature."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from rich.table import Table

from bootstrap.creating.run import RUN_KEY
from bootstrap.display import plain_table
from bootstrap.inspect.link_map import LinkMap, link_map, scenario_of, seen_from_outside
from bootstrap.inspect.observer import Observer, visit
from bootstrap.lab.placement.kernels import Integers
from bootstrap.lab.placement.noloco import NolocoProblem
from bootstrap.lab.placement.plan import Placement
from bootstrap.lab.placement.scenario import Scenario, scenario_from
from bootstrap.lab.placement.search import Problem
from node.membership.capacity import Peer, peer_of
from node.membership.discovery import DHT_DEADLINE
from node.model.stage import work_of
from protocol.errors import JoinError, RecordError, ScenarioError, StateError, UserError, later
from protocol.ground import PeerId
from protocol.records.identity import Identity
from protocol.records.records import MAX_LIFETIME
from protocol.run.manifest import Manifest
from protocol.run.placement_plan import PlacementPlan, open_plan, plan_key
from protocol.run.signed_manifest import SignedManifest

AS_GOOD = 1.05  # of the cost: links are measured no better than that, and each move downloads a stage


@dataclass(frozen=True)
class LiveSwarm:
    """A run as seen from outside; `peers` in the order of `links`, `now` on the swarm's clock."""

    signed: SignedManifest
    links: LinkMap
    peers: tuple[Peer, ...]
    now: float

    @property
    def manifest(self) -> Manifest:
        return self.signed.manifest

    @property
    def stage_of(self) -> Integers:
        """The present stage of each peer [N]."""
        return np.array([peer.stage for peer in self.peers], np.int64)

    def scenario(self) -> Scenario:
        """The scenario with the speeds that the nodes tell and the stages that they may serve. Raises
        `ScenarioError`.
        """
        if len(self.peers) < max(2, self.manifest.stages):
            raise ScenarioError(
                f"{len(self.peers)} nodes cannot fill {self.manifest.stages} stages: wait until more have joined."
            )
        known = {
            "may_serve": [sorted({*peer.may_serve, peer.stage}) for peer in self.peers],
            "throughput": relative_speeds(self.peers, self.manifest),
        }
        return scenario_from(scenario_of(self.links, self.manifest) | known)


async def look_at(join: Sequence[str], token: str, directories: Sequence[Path] = ()) -> LiveSwarm:
    """Visit a run and look at it. Arguments and errors as of `visit`."""
    async with visit(join, token, directories) as observer:
        return await seen_by(observer)


async def seen_by(observer: Observer) -> LiveSwarm:
    sightings = await observer.survey()
    links = link_map(seen_from_outside(sightings, observer.manifest))
    known = {s.member.peer: peer_of(s.member) for s in sightings}
    return LiveSwarm(
        observer.signed, links, tuple(known[peer] for peer in links.peers), observer.transport.now()
    )


def relative_speeds(peers: Sequence[Peer], manifest: Manifest) -> list[float] | None:
    """Microbatches per second of each peer, at a stage of mean work.

    A peer that publishes no speed gets the median of those that do; None when no peer does.
    """
    work = [work_of(manifest, stage) for stage in range(manifest.stages)]
    shares = [amount / fmean(work) for amount in work]
    speeds = np.array([p.capacity * shares[p.stage] if p.capacity else np.nan for p in peers])
    if np.isnan(speeds).all():
        return None
    known: list[float] = np.where(np.isnan(speeds), np.nanmedian(speeds), speeds).tolist()
    return known


# --- who would move ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Moves:
    """The moves to a plan; `stage_of` [N] is its variant that needs the fewest, costs are in seconds."""

    peers: tuple[Peer, ...]
    stage_of: Integers
    cost_now: float
    cost: float
    names: tuple[str, ...]  # of the peers, for people

    @property
    def movers(self) -> list[tuple[int, Peer, int]]:
        """Device, peer and its stage in the plan, of each that would move."""
        return [
            (i, peer, int(stage))
            for i, (peer, stage) in enumerate(zip(self.peers, self.stage_of, strict=True))
            if peer.stage != stage
        ]

    def sentence(self) -> str:
        if not self.movers:
            return f"Nobody would move: a step takes {self.cost_now:.3f} s as it is."
        now = (
            f"takes {self.cost_now:.3f} s"
            if math.isfinite(self.cost_now)
            else "cannot end, a stage is too small,"
        )
        count = f"{len(self.movers)} of {len(self.peers)}"
        return f"{count} nodes would move: a step {now} now, and would take {self.cost:.3f} s."

    def as_json(self) -> dict[str, object]:
        return {
            "peers": [peer.peer for peer in self.peers],
            "stages_now": [peer.stage for peer in self.peers],
            "stage_of": self.stage_of.tolist(),
            "cost_now": self.cost_now if math.isfinite(self.cost_now) else None,
            "cost_with_fewest_moves": self.cost,
            "moves": [{"peer": peer.peer, "source": peer.stage, "target": t} for _, peer, t in self.movers],
        }


def moves_of(swarm: LiveSwarm, problem: Problem, plan: Placement) -> Moves:
    current, found = swarm.stage_of, np.empty(len(swarm.peers), np.int64)
    for stage, devices in enumerate(plan.stages):
        found[list(devices)] = stage
    if isinstance(problem, NolocoProblem):
        found = with_fewest_moves(problem.cost, current, found, problem.stages)
        return Moves(swarm.peers, found, problem.cost(current), problem.cost(found), swarm.links.called)
    is_even = len(set(np.bincount(current, minlength=problem.stages))) == 1
    now = problem.cost(current) if is_even else math.inf
    return Moves(swarm.peers, found, now, plan.cost, swarm.links.called)


def with_fewest_moves(
    cost: Callable[[Integers], float], current: Integers, found: Integers, stages: int
) -> Integers:
    """A placement [N] near `current` whose cost is within `AS_GOOD` of the cost of `found`.

    It tries the present placement, the stages in the opposite order, and then leaving devices where they are, one
    by one or by swapping two of the plan, for as long as that helps: up to N² evaluations a pass.
    """
    limit = AS_GOOD * cost(found)
    if cost(current) <= limit:
        return current.copy()
    candidates = [found, stages - 1 - found]
    planned = min((p for p in candidates if cost(p) <= limit), key=lambda p: int((p != current).sum())).copy()
    while (nearer := _step_back(cost, current, planned, limit)) is not None:
        planned = nearer
    return planned


def _step_back(
    cost: Callable[[Integers], float], current: Integers, planned: Integers, limit: float
) -> Integers | None:
    """The first change within `limit` that keeps two devices more where they are, or else one."""
    misplaced = np.flatnonzero(planned != current)
    for device in misplaced:
        goal, home = planned[device], current[device]
        at_home = np.flatnonzero(planned == home)
        swaps = sorted(at_home, key=lambda e: (current[e] != goal, current[e] == home, int(e)))
        for other in [*(e for e in swaps if current[e] != home), None]:
            tried = planned.copy()
            tried[device] = home
            if other is not None:
                tried[other] = goal
            if cost(tried) <= limit:
                return tried
    return None


def moves_table(moves: Moves) -> Table:
    table = plain_table("Moves", ("node", "from stage", "to stage"), left=("node",))
    for device, peer, target in moves.movers:
        table.add_row(moves.names[device], str(peer.stage), str(target))
    return table


# --- publishing -------------------------------------------------------------------------------


def signed_plan(swarm: LiveSwarm, moves: Moves, directory: Path, seconds: float) -> bytes:
    """Sign with the key that `noloco-bootstrap` keeps in the directory. Raises `StateError` for another run's."""
    key = _run_key(swarm.signed, directory)
    stages: list[list[PeerId]] = [[] for _ in range(swarm.manifest.stages)]
    for peer, stage in zip(moves.peers, moves.stage_of, strict=True):
        stages[stage].append(peer.peer)
    return PlacementPlan.of(swarm.signed.run_id, stages, swarm.now, seconds).sign(key)


def _run_key(signed: SignedManifest, directory: Path) -> Identity:
    key = Identity.load(directory / RUN_KEY)
    if key.public_key != signed.public_key:
        raise StateError(
            f"{directory / RUN_KEY} is the key of another run. Name the directory of run "
            f"{signed.run_id} (noloco found --state-dir) with --publish."
        )
    return key


async def publish_plan(
    join: Sequence[str],
    token: str,
    swarm: LiveSwarm,
    sealed: bytes,
    seconds: float,
    directories: Sequence[Path] = (),
) -> None:
    """Publish a plan; nodes keep copies until it expires. Raises as `visit`, and `JoinError` when nobody takes it."""
    async with visit(join, token, directories) as observer:
        await _put_plan(observer, sealed, seconds)


async def _put_plan(observer: Observer, sealed: bytes, seconds: float) -> None:
    lifetime = min(MAX_LIFETIME, seconds)
    key = plan_key(observer.signed.run_id)
    if not await observer.transport.put(key, sealed, lifetime, DHT_DEADLINE):
        raise later(JoinError("No peer has taken the plan. Try again, with the address of another member."))


async def end_waits(observer: Observer, stages: Sequence[int], directory: Path, seconds: float) -> None:
    """Publish that nobody is to wait for the state of these stages; the places of the plan in force stay.

    Raises `StateError` when the key cannot be used, `UserError` for a stage that the run has not, and `JoinError`
    when nobody takes it.
    """
    signed, now = observer.signed, observer.transport.now()
    if wrong := [stage for stage in stages if stage >= observer.manifest.stages]:
        raise UserError(f"There is no stage {wrong[0]}: the run has {observer.manifest.stages}, from 0 on.")
    key, plans = _run_key(signed, directory), list[PlacementPlan]()
    for record in await observer.transport.get(plan_key(signed.run_id), DHT_DEADLINE):
        with suppress(RecordError):
            plans.append(open_plan(record.value, signed.public_key, signed.run_id, now))
    if plans:
        plan = max(plans, key=lambda one: one.issued)
        until = max(plan.expires, now + seconds)
        plan = plan.model_copy(update={"issued": now, "expires": until, "begin_anew": list(stages)})
    else:
        plan = PlacementPlan.of(signed.run_id, [], now, seconds, stages)
    await _put_plan(observer, plan.sign(key), plan.expires - now)
