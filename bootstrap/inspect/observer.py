"""A visitor of a swarm: reads the records, asks the nodes, trains nothing and is not announced."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch

from bootstrap.inspect.credentials import addresses_to_visit, token_finder
from node.membership.discovery import DHT_DEADLINE, read_whole_stage
from node.membership.entry import enter
from node.membership.joining import DIAL_DEADLINE, HELLO_DEADLINE, greet, passing_by, payload_limits
from node.membership.view import Member, View
from node.model.fragment import PIECE_PARAMETERS
from node.model.stage import parameter_count
from node.state.transfer import fetch_slow_weights, piece_count
from node.watch.words import print_wrapped
from protocol.access.admission import Admission
from protocol.errors import JoinError, NolocoError, Refused, TokenError, later
from protocol.ground import PeerId
from protocol.messages.peers import GetStats, NodeStats
from protocol.messages.state import MOST_POSITIONS, GetStateSample
from protocol.rpc.door import STRANGER
from protocol.rpc.patience import Patience
from protocol.rpc.rpc import Rpc
from protocol.run.manifest import Manifest
from protocol.run.signed_manifest import SignedManifest
from protocol.supervision import all_of, cancelled
from protocol.transport.base import Transport

T = TypeVar("T")

logger = logging.getLogger(__name__)

STATS_DEADLINE = 3.0
ASKED_AT_ONCE = 32
# As long as joining looks: dialling, greeting, and the looks of a machine that has other things to do
SURVEY_SECONDS = DIAL_DEADLINE + HELLO_DEADLINE + DHT_DEADLINE
TOLD_SECONDS = 3.0  # of looking, after which a visitor says what it looks for
PAUSE_SECONDS = 0.5  # between looks, and before a route is asked again
ROUTE_TRIES = 3
MOST_ROUTES = 8  # tried for one text
LEAST_COMPARED = 2  # replicas of a stage that have a spread
PIECES_SAMPLED = 4  # of a stage, for the spread
FEWEST_TO_TELL = 3  # replicas, of which one that lies about its weights stands out
FAR = 10.0  # times the median replica's distance; honest ones of one stage are within two of each other
MOST_SHOWN = 8_192  # members of a stage
_CHECK = "Check that the address is current and complete, that the peer runs, and that its TCP port is open."


@dataclass(frozen=True)
class Sighting:
    """A member's record, with its own fresh numbers when it answered."""

    member: Member
    stats: NodeStats | None
    ahead: float | None = None  # seconds of its clock before the observer's, when it answered; None: not told

    @classmethod
    def of(cls, member: Member, stats: NodeStats, now: float) -> Sighting:
        """The sighting of a member whose answer came at the observer's wall clock `now`."""
        return cls(member, stats, None if stats.time is None else stats.time - now)


class Observer:
    """A visitor's view of the swarm's records, and how long it has looked for what it misses.

    It `tell`s what it waits for.
    """

    def __init__(
        self,
        transport: Transport,
        rpc: Rpc,
        signed: SignedManifest,
        tell: Callable[[str], None] = logger.info,
        admission: Admission | None = None,
    ) -> None:
        """`admission` is that to a run that has rules of access."""
        self.admission = admission
        self.transport = transport
        self.rpc = rpc
        self.signed = signed
        self.view = View(most=MOST_SHOWN)
        self._tell = tell
        self._looked = 0.0  # seconds of the last survey
        rpc.limit(payload_limits(signed.manifest))

    @property
    def manifest(self) -> Manifest:
        return self.signed.manifest

    def called(self, route: Sequence[PeerId]) -> str:
        """Name the replicas of a route for people, in the order of its stages."""
        return " → ".join(map(self.view.called, route))

    async def look(self) -> list[Sighting]:
        """All members by stage and peer id. A node that does not answer soon is shown by its record.

        Raises `TokenError` when all that answer refuse this visitor: what they do is then not known.
        """
        for stage in range(self.manifest.stages):
            await read_whole_stage(self.transport, self.signed.run_id, stage, self.view)
        now = self.transport.now()
        self.view.expire(now)
        members = [m for stage in range(self.manifest.stages) for m in self.view.members(stage, now)]
        slots, refusals = asyncio.Semaphore(ASKED_AT_ONCE), list[Refused]()

        async def ask(member: Member) -> Sighting:
            async with slots:
                try:
                    stats, _ = await self.rpc.call(member.peer, GetStats(), deadline=STATS_DEADLINE)
                except Refused as refusal:
                    refusals.extend([refusal] if refusal.code in (STRANGER, "no-record") else [])
                    return Sighting(member, None)
                except NolocoError:  # it is still joining, or gone
                    return Sighting(member, None)
                return Sighting.of(member, stats, self.transport.now())

        sightings = await all_of(*(ask(member) for member in members))
        if any(sighting.stats is not None for sighting in sightings):
            return sightings
        if refusals or await self._is_refused():
            raise TokenError(
                f"No node of run {self.signed.run_id} lets this visitor in: its token is over or revoked, or too "
                "many visit with it at a time. Try again in a minute, or ask the run's owner for another one."
            )
        return sightings

    async def _is_refused(self) -> bool:
        """Return whether a peer that this one is connected with does not let it in: nodes then show no records."""
        shown = self.rpc.introduction
        if shown is None:
            return False

        async def refuses(peer: PeerId) -> bool:
            try:
                await self.rpc.call(peer, shown, deadline=STATS_DEADLINE)
            except Refused:
                return True
            except NolocoError:
                return False
            return False

        connected = (await self.transport.peers())[:ASKED_AT_ONCE]
        return any(await all_of(*(refuses(peer) for peer, _ in connected)))

    async def survey(self) -> list[Sighting]:
        """Look, and look again for `SURVEY_SECONDS` while a stage seems to be empty.

        A visitor that has just come, or one to a swarm that has just started, does not find all records at once.
        """
        loop, told = asyncio.get_running_loop(), False
        began = loop.time()
        while True:
            sightings = await self.look()
            self._looked = loop.time() - began
            missing = set(range(self.manifest.stages)) - {
                seen.member.announcement.stage for seen in sightings
            }
            if not missing or self._looked > SURVEY_SECONDS:
                return sightings
            if not told and self._looked > TOLD_SECONDS:
                names = ", ".join(f"stage {stage}" for stage in sorted(missing))
                self._tell(f"Found nobody at {names} so far; looking for {SURVEY_SECONDS:.0f} s at most.")
                told = True
            await asyncio.sleep(PAUSE_SECONDS)

    def nobody_at(self, stage: int) -> JoinError:
        """The error for a stage of which the last survey found no record."""
        return later(
            JoinError(
                f"Found no record of stage {stage} of {self.manifest.stages} in {self._looked:.0f} s: nobody serves "
                "it, or its members cannot be found from here. `noloco status` shows who is there; try again once "
                "somebody has joined."
            )
        )

    async def routes(self, among: Collection[PeerId] | None = None) -> list[list[PeerId]]:
        """Ways through the pipeline, replica i of every stage for the i-th; as many as the largest stage.

        They lead only through peers `among` these, if any are named. A replica that does not answer is left out where
        others of the stage do: a record outlives its node for a while.
        Raises `JoinError` when a stage has no replica that could answer.
        """
        silent = {seen.member.peer for seen in await self.survey() if seen.stats is None}
        stages, now = self.manifest.stages, self.transport.now()
        holders = [_those(among, self.view.holding(stage, now)) for stage in range(stages)]
        for stage, holding in enumerate(holders):
            if not holding:
                raise self.nobody_at(stage)
        there = [[peer for peer in holding if peer not in silent] or holding for holding in holders]
        return [[holding[i % len(holding)] for holding in there] for i in range(max(map(len, there)))]

    async def drawn_routes(self) -> list[list[PeerId]]:
        """Return some of the `routes` at random, to be tried in this order: a replica that keeps requests is in few.

        In the order of `routes` every visitor would come to the same replicas first.
        """
        routes = await self.routes()
        return random.sample(routes, min(len(routes), MOST_ROUTES))

    def hops_after_first(self, route: Sequence[PeerId]) -> list[str]:
        """The peers to which a request goes from the first peer of the route on; in a ring it ends there."""
        return [*route[1:], *(route[:1] if self.manifest.is_ring else ())]


Attempt: TypeAlias = Callable[[Callable[[], None]], Awaitable[T]]


async def first_of(attempts: Sequence[Attempt[T]], patience: float) -> tuple[int, T]:
    """Begin one attempt after another until one succeeds; return its index and its result, and cancel the others.

    The next one begins, beside those under way, when an attempt fails, or `patience` seconds after the last one began
    or called its argument, which it does whenever it gets on. Once all have failed, the first failure is raised. A
    `NolocoError` alone counts as a failure.
    """
    clock = asyncio.get_running_loop().time
    tasks: list[asyncio.Task[T]] = []
    signs: list[float] = []
    failures: list[NolocoError] = []

    def sign(index: int) -> None:
        signs[index] = clock()

    try:
        while len(failures) < len(attempts):
            under_way = [task for task in tasks if not task.done()]
            if len(tasks) < len(attempts) and (not under_way or clock() >= signs[-1] + patience):
                signs.append(clock())
                begun = attempts[len(tasks)](partial(sign, len(tasks)))
                tasks.append(asyncio.ensure_future(begun))
                continue
            wait = signs[-1] + patience - clock() if len(tasks) < len(attempts) else None
            done, _ = await asyncio.wait(under_way, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                try:
                    return tasks.index(task), task.result()
                except NolocoError as failure:
                    failures.append(failure)
                    signs[-1] = -math.inf
        raise failures[0]
    finally:
        await cancelled(tasks)


def route_patience() -> Patience:
    """A minute of silence, as a slow stage reports progress; in all, longer than nodes wait for each other."""
    return Patience(60.0, 1_200.0)


@asynccontextmanager
async def visit(
    join: Sequence[str], token: str = "", directories: Sequence[Path] = ()
) -> AsyncIterator[Observer]:
    """Join a running swarm as an observer for a while, a private one with a `token`.

    Without one it is looked for in these `directories` and wherever `token_finder` does; so are addresses to `join`.
    Raises `JoinError` when nobody answers, `TokenError` where the run is private and the token is not for it.
    """
    async with passing_by(addresses_to_visit(join, directories), _CHECK) as here:
        greeting = await greet(here.rpc, here.transport, here.reached, None)
        finder = token_finder(token, directories)
        admission = await enter(here.rpc, greeting.signed, greeting.revoked, finder, takes_part=False)
        yield Observer(here.transport, here.rpc, greeting.signed, _tell_on_stderr, admission)


def _tell_on_stderr(sentence: str) -> None:
    print_wrapped(sentence, on_error=True)


def _those(among: Collection[PeerId] | None, peers: list[PeerId]) -> list[PeerId]:
    return [peer for peer in peers if among is None or peer in among]


async def measure_spread(observer: Observer, among: Collection[PeerId] | None = None) -> float | None:
    """Root mean squared deviation of φ from its mean, over the replicas and parameters of all stages.

    Only replicas `among` these count, if any are named. None where a stage has no two of them in view: without the
    others that trained, the number would say that they agree.
    Fetches every replica's state: for small models and swarms. Raises `JoinError` when one goes away.
    """
    squares, entries = 0.0, 0
    for stage in range(observer.manifest.stages):
        parameters = parameter_count(observer.manifest, stage)
        replicas = [
            (await fetch_slow_weights(observer.rpc, stage, parameters, peer))[0]
            for peer in _those(among, observer.view.holding(stage, observer.transport.now()))
        ]
        if len(replicas) < LEAST_COMPARED:
            return None
        squares += squared_deviation(replicas)
        entries += sum(replica.numel() for replica in replicas)
    return math.sqrt(squares / entries)


async def sampled_spreads(observer: Observer, rng: random.Random) -> dict[int, float]:
    """Spread by stage, on random entries of φ of all replicas that answer, at one moment.

    1,024 entries of each of up to `PIECES_SAMPLED` pieces, by a request each: within 5 % or so of the whole. Stages
    of which no two replicas answer are left out.
    """
    spreads = {}
    for stage in range(observer.manifest.stages):
        parameters = parameter_count(observer.manifest, stage)
        pieces = range(piece_count(parameters))
        samples = [
            await _sampled(observer, stage, piece, parameters, rng)
            for piece in rng.sample(pieces, min(PIECES_SAMPLED, len(pieces)))
        ]
        variances = [squared_deviation(phi) / (len(phi) * len(phi[0])) for phi in samples if len(phi) > 1]
        if variances:
            spreads[stage] = math.sqrt(sum(variances) / len(variances))
    return spreads


def spread_of_all(manifest: Manifest, spreads: Mapping[int, float]) -> float | None:
    """The spread over all stages, weighted by their parameters; None without any."""
    sizes = {stage: parameter_count(manifest, stage) for stage in spreads}
    if not sizes:
        return None
    return math.sqrt(sum(sizes[stage] * spreads[stage] ** 2 for stage in sizes) / sum(sizes.values()))


async def _sampled(
    observer: Observer, stage: int, piece: int, parameters: int, rng: random.Random
) -> list[torch.Tensor]:
    """φ of each replica that answers within `STATS_DEADLINE`, at the same positions of a piece."""
    size = min(PIECE_PARAMETERS, parameters - piece * PIECE_PARAMETERS)
    positions = rng.sample(range(size), min(MOST_POSITIONS, size))
    request = GetStateSample(stage=stage, index=piece, positions=positions)

    async def ask(peer: PeerId) -> torch.Tensor | None:
        with contextlib.suppress(NolocoError):
            return (await observer.rpc.call(peer, request, deadline=STATS_DEADLINE))[1][0]
        return None

    holding = observer.view.holding(stage, observer.transport.now())
    answers = await all_of(*(ask(peer) for peer in holding[:ASKED_AT_ONCE]))
    return like_most([phi for phi in answers if phi is not None])


def like_most(replicas: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those of several φ [entries] that are at most `FAR` times as far from their median as the median replica is.

    Of two nobody can tell which one lies.
    """
    if len(replicas) < FEWEST_TO_TELL:
        return replicas
    stacked = torch.stack(replicas).double()
    distances = (stacked - stacked.median(0).values).square().mean(1).sqrt()
    most = FAR * distances.sort().values[len(replicas) // 2]
    return [phi for phi, distance in zip(replicas, distances, strict=True) if distance <= most]


def squared_deviation(replicas: Sequence[torch.Tensor]) -> float:
    """The sum over replicas and parameters of the squared difference from the replicas' mean."""
    if not replicas:
        return 0.0
    mean = torch.stack(list(replicas)).double().mean(0)
    return float(sum((replica.double() - mean).square().sum() for replica in replicas))
