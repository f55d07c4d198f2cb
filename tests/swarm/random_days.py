"""Random days of a small run: what people and their machines do, one thing after another, and what must hold anyhow.

The ground truth of where weights come from is kept apart from what the nodes say: by their digests, from the replica
that began a lineage to every one that took them over.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.context import Context
from node.model.replica import Replica
from node.rounds.gossip import PairAverager
from node.service.first_state import FEW_STEPS, FirstState
from node.state import copy_keeper
from node.state.checkpoints import Checkpoints
from node.state.copies import NEAR_ROUNDS
from node.state.copy_keeper import copies_in
from node.storage import state_directory
from node.storage.checkpoint_files import Checkpoint, KeptCheckpoint
from node.storage.state_directory import StateDirectory
from protocol.errors import NolocoError
from protocol.ground import PeerId
from protocol.records.identity import Identity
from protocol.records.lineage import Lineage
from protocol.run.manifest import Manifest
from tests.swarm.micro import FOREVER, micro_swarm, peer_of, step_of, until

INNER_STEPS = 2
FIRST_STEPS = 14  # before anything happens: more than a stage has that is not waited for
RETURN = 60.0  # seconds that a stage is waited for
LIFETIME = 6.0  # seconds, of records
SPEED = 0.12  # of all nodes: a virtual second has few steps
SETTLED = 40.0  # seconds after which a peer that can be reached has been reached
ACTS = 8
TELLING = (
    "initialised", "restored", "downloaded", "copy-taken", "waiting-for-stage", "begun-anew", "yielded", "moved",
    "checkpoint-failed", "paused", "last-replica",
)  # fmt: skip
SEED = -1  # the seed peer's number


class Wrong(AssertionError):
    """What must not happen."""


class Origins:
    """The lineage that weights truly have, by digest. Mutable state: those, and what each peer had since when."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._of: dict[bytes, Lineage] = {}
        self._of_seed = set[bytes]()  # weights that every beginning has
        self._had: dict[PeerId, list[tuple[float, int, Lineage]]] = defaultdict(list)

    def register(self, phi: torch.Tensor, origin: Lineage | None) -> None:
        digest = _digest(phi)
        if origin is None or digest in self._of_seed:
            return
        known = self._of.setdefault(digest, origin)
        if not known.is_same(origin, LIFETIME):
            raise Wrong(f"weights of {known} are said to be of {origin}")

    def is_of_seed(self, phi: torch.Tensor) -> None:
        self._of_seed.add(_digest(phi))

    def of(self, phi: torch.Tensor, said: Lineage) -> Lineage:
        """The origin of weights that are taken over, said to be of a lineage."""
        digest = _digest(phi)
        if digest in self._of_seed:
            return said
        if digest not in self._of:
            raise Wrong(f"weights said to be of {said} come from nowhere")
        if not self._of[digest].is_same(said, LIFETIME):
            raise Wrong(f"weights of {self._of[digest]} are taken over as of {said}")
        return self._of[digest]

    def had_by(self, peer: PeerId, stage: int, origin: Lineage) -> None:
        self._had[peer].append((self._now(), stage, origin))

    def lately_of(self, peer: PeerId, stage: int, seconds: float = 30.0) -> list[Lineage]:
        had = [one for one in self._had[peer] if one[1] == stage]
        since = self._now() - seconds
        return [origin for place, (_, _, origin) in enumerate(had) if had[place + 1 : place + 2] == []
                or had[place + 1][0] >= since]  # fmt: skip


def _digest(phi: torch.Tensor) -> bytes:
    return hashlib.sha256(phi.detach().contiguous().numpy().tobytes()).digest()


class Traced(Replica):
    """A replica that knows where its weights truly come from."""

    def __init__(self, manifest: Manifest, stage: int, device: str, day: Day, peer: PeerId) -> None:
        super().__init__(manifest, stage, device)
        self.day, self.peer, self._stage = day, peer, stage
        self.origin: Lineage | None = None
        day.origins.is_of_seed(self.phi)

    def comes_from(self, origin: Lineage) -> None:
        self.origin = origin
        self.day.origins.had_by(self.peer, self._stage, origin)

    def read_piece(self, index: int, moments: bool) -> list[torch.Tensor]:
        self.day.origins.register(self.phi, self.origin)
        return super().read_piece(index, moments)

    def adopt(self, pieces: Any, *args: Any) -> None:
        super().adopt(pieces, *args)
        self.comes_from(self.day.origins.of(self.phi, self.lineage))

    def restore(self, state: Any) -> None:
        super().restore(state)
        self.comes_from(self.day.origins.of(self.phi, state.lineage))


class Day:
    """One run and what happens to it.

    Mutable state: which nodes are pinned, frozen, cut off or have a full disk, since when each can be reached, and
    what was ever saved.
    """

    def __init__(self, directory: Path, seed: int, replicas: int, stages: int) -> None:
        self.rng = random.Random(f"day {seed}")
        self.directory = directory
        self.replicas, self.stages = replicas, stages
        self.keeps_copies = seed % 2 == 1
        self.swarm: SimulatedSwarm = micro_swarm(
            seed,
            directory,
            stages=stages,
            model__layers=stages,
            inner__total_steps=FOREVER,
            outer__inner_steps=INNER_STEPS,
            limits__stage_return=RETURN,
        )
        self.origins = Origins(self.swarm.network.now)
        self.pinned: dict[int, int] = {}
        self.full = set[Path]()
        self.reachable_since: dict[int, float] = defaultdict(lambda: self.now)
        self.best: dict[int, dict[Lineage, int]] = defaultdict(dict)  # the furthest step ever saved
        self.log: list[str] = []
        self.wrong: list[str] = []
        self.averagings = 0
        self._later: list[asyncio.Task[None]] = []
        (directory / "seed").mkdir()

    @property
    def now(self) -> float:
        return self.swarm.network.now()

    @property
    def numbers(self) -> range:
        return range(self.replicas * self.stages)

    def note(self, sentence: str) -> None:
        self.log.append(f"{self.now - 1_700_000_000:7.1f} {sentence}")

    def accuse(self, sentence: str) -> None:
        self.note(f"WRONG: {sentence}")
        self.wrong.append(sentence)

    # --- the day ------------------------------------------------------------------------------

    async def live(self) -> None:
        await self.swarm.seed_peer.start()
        self.swarm.seed_peer.tell_newcomers()
        if self.keeps_copies:
            self.swarm.seed_peer.keep_copies(copies_in(self.directory / "seed"))
        for number in self.numbers:
            self.start(number, number % self.stages)
        await until(lambda: all(step_of(n) >= FIRST_STEPS for n in self.swarm.nodes.values()), 600)
        for _ in range(ACTS):
            await self.act()
            await asyncio.sleep(self.rng.choice([1, 5, 20, 45]))
            self.reap()
            self.check_disks()
        await self.evening()

    async def act(self) -> None:
        present = sorted(self.swarm.nodes)
        absent = [number for number in self.numbers if number not in present]
        acts = [self.pause, self.resume, self.leave, self.kill, self.move, self.sleep, self.fill]
        names = acts if present else []
        if absent and (not present or self.rng.random() < 0.4):
            self.start(self.rng.choice(absent))
        elif self.rng.random() < 0.12:
            self.part()
        else:
            await self.rng.choice(names)(self.rng.choice(present))

    async def evening(self) -> None:
        """All trouble ends, and all come back to where they were first: the swarm trains on."""
        self.note("evening")
        await asyncio.gather(*self._later)
        self.reap()
        for node in self.swarm.nodes.values():
            node.rest.lift("volunteer")
        await asyncio.sleep(20)
        self.reap()
        for number in list(self.swarm.nodes):
            if self.swarm.nodes[number].stage != number % self.stages:
                await self.leave(number)
        for number in self.numbers:
            if number not in self.swarm.nodes:
                self.start(number, number % self.stages)
        await self.all_go_on()
        await until(self.is_of_one_mind, 400)
        await self.all_go_on()
        self.check_disks()
        await self.swarm.leave()
        self.check_disks()
        seen = Counter(entry["event"] for entry in self.swarm.events)
        self.note("events: " + ", ".join(f"{seen[name]} {name}" for name in TELLING))
        self.note(f"averaged {self.averagings} times")

    async def all_go_on(self, seconds: float = 500.0) -> None:
        goals: dict[int, int] = {}

        def have() -> bool:
            self.reap(again=True)
            for number, node in self.swarm.nodes.items():
                if number not in goals and step_of(node):
                    goals[number] = step_of(node) + 4
            return len(goals) == len(self.numbers) and all(
                step_of(self.swarm.nodes[number]) >= goal for number, goal in goals.items()
            )

        await until(have, seconds, 1.0)

    def is_of_one_mind(self) -> bool:
        """Return whether all replicas of each stage have one lineage."""
        nodes = self.swarm.nodes.values()
        of_stages = [[n.replica.lineage for n in nodes if n.stage == stage] for stage in range(self.stages)]
        return all(one.is_same(found[0], LIFETIME) for found in of_stages for one in found)

    # --- what may happen ----------------------------------------------------------------------

    def start(self, number: int, stage: int = -1) -> None:
        self.note(f"start {number} at {stage}")
        self.pinned[number] = stage
        peer = Identity.from_seed("node", self.swarm.seed, number).peer_id
        self.reachable_since[number] = self.now
        self.swarm.add(
            number,
            stage=stage,
            speed=SPEED,
            replica=lambda manifest, at, device: Traced(manifest, at, device, self, peer),
        )

    async def pause(self, number: int) -> None:
        self.note(f"pause {number}")
        self.swarm.nodes[number].rest.ask("volunteer", "you asked for it.")

    async def resume(self, number: int) -> None:
        self.note(f"resume {number}")
        self.swarm.nodes[number].rest.lift("volunteer")

    async def leave(self, number: int) -> None:
        if self.swarm.network.faults.frozen(peer_of(self.swarm.nodes[number])):
            return
        self.note(f"leave {number} from {self.swarm.nodes[number].stage}")
        self.swarm.nodes[number].stop()
        await asyncio.wait([self.swarm.tasks[number]], timeout=300.0)
        if not self.swarm.tasks[number].done():
            raise Wrong(f"node {number} did not leave")
        self.reap()

    async def kill(self, number: int) -> None:
        self.note(f"kill {number} at {self.swarm.nodes[number].stage}")
        self.swarm.kill(number)

    async def move(self, number: int) -> None:
        """Stop it, and start it at another stage."""
        stage = self.swarm.nodes[number].stage
        others = [one for one in range(self.stages) if one != stage]
        await self.leave(number)
        if number not in self.swarm.nodes:
            self.start(number, self.rng.choice(others))

    async def sleep(self, number: int) -> None:
        seconds, peer = self.rng.choice([5, 30, 90]), peer_of(self.swarm.nodes[number])
        self.note(f"sleep {number} for {seconds}")
        self.swarm.network.freeze(peer)

        def wake() -> None:
            self.swarm.network.thaw(peer)
            self.reachable_since[number] = self.now

        self.after(seconds, wake)

    def part(self) -> None:
        everyone = {SEED: self.swarm.seed_peer.transport.peer_id} | {
            number: peer_of(node) for number, node in self.swarm.nodes.items()
        }
        side = self.rng.sample(sorted(everyone), self.rng.randint(1, max(1, len(everyone) - 1)))
        seconds = self.rng.choice([10, 40, 100])
        self.note(f"partition {side} for {seconds}")
        self.swarm.network.partition([everyone[number] for number in side])

        def heal() -> None:
            self.swarm.network.heal()
            self.reachable_since.clear()  # all since now

        self.after(seconds, heal)

    async def fill(self, number: int) -> None:
        seconds, path = self.rng.choice([20, 60, 120]), self.directory / f"node-{number}"
        self.note(f"disk full {number} for {seconds}")
        self.full.add(path)
        self.after(seconds, lambda: self.full.discard(path))

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            then()

        self._later.append(asyncio.get_running_loop().create_task(wait()))

    def reap(self, again: bool = False) -> None:
        """Clear away the nodes that have ended; `again` starts those that ended with an error once more."""
        for number, task in list(self.swarm.tasks.items()):
            if not task.done():
                continue
            del self.swarm.tasks[number], self.swarm.nodes[number]
            error = task.exception()
            if error is not None:
                self.note(f"node {number} ended: {type(error).__name__}: {error}")
                if not isinstance(error, NolocoError):
                    raise Wrong(f"node {number} ended with {error!r}") from error
                if again:
                    self.start(number, number % self.stages)

    # --- what must hold -----------------------------------------------------------------------

    def saved(self, directory: Path, stage: int, lineage: Lineage, step: int) -> None:
        if step:
            best = self.best[stage]
            of = next((one for one in best if one.is_same(lineage, LIFETIME)), lineage)
            best[of] = max(best.get(of, 0), step)

    def kept_on(self, place: Path) -> list[KeptCheckpoint]:
        return StateDirectory(place).kept_with_older(self.swarm.seed_peer.signed.run_id)

    def check_disks(self) -> None:
        """The oldest lineage of each stage is on some disk as far as it was ever saved, but for `NEAR_ROUNDS`.

        A replica that comes back alone goes on from its own checkpoint, though a copy may be that much further than
        the last record of the stage, which is older than the copy by up to as much again.
        """
        places = [*self.directory.glob("node-*"), self.directory / "seed" / "copies"]
        kept = [one for place in places if place.exists() for one in self.kept_on(place)]
        for stage, best in self.best.items():
            oldest = min(best)
            there = [k.step for k in kept if k.stage == stage and k.lineage.is_same(oldest, LIFETIME)]
            if max(there, default=0) < best[oldest] - 2 * NEAR_ROUNDS * INNER_STEPS or not there:
                self.accuse(f"stage {stage} of {oldest} was saved at step {best[oldest]}, kept are {there}")

    def began(self, context: Context, waited: bool) -> None:
        """Check that nobody who can be reached has a state of the stage that is begun."""
        me, stage = context.me, context.stage
        witnesses: dict[str, Any] = {}
        for number, node in self.swarm.nodes.items():
            if peer_of(node) == me:
                held = self.kept_on(self.directory / f"node-{number}")
                self._accuse_holder(f"itself ({number})", stage, held)
            elif self.is_reachable(me, number, peer_of(node)):
                self._accuse_holder(f"node {number}", stage, self.kept_on(self.directory / f"node-{number}"))
                witnesses[f"node {number}"] = getattr(node.member, "past", None)
        if self.is_reachable(me, SEED, self.swarm.seed_peer.transport.peer_id):
            witnesses["the seed peer"] = self.swarm.seed_peer.past
            if self.keeps_copies:
                self._accuse_holder("the seed peer", stage, self.kept_on(self.directory / "seed" / "copies"))
        for name, past in witnesses.items():
            known = (
                [one for one in past.of(stage, without=me) if one.peer != name] if past is not None else []
            )
            if known and max(one.step for one in known) > FEW_STEPS and not waited:
                self.accuse(
                    f"stage {stage} was begun without a wait, though {name} remembers {known[0].step}"
                )

    def _accuse_holder(self, name: str, stage: int, kept: list[KeptCheckpoint]) -> None:
        for one in kept:
            if one.stage == stage and one.step:
                self.accuse(f"stage {stage} was begun, though {name} has it at step {one.step}")

    def is_reachable(self, me: PeerId, number: int, peer: PeerId) -> bool:
        is_cut = bool(self.swarm.network.faults.between(me, peer))
        return not is_cut and (number == SEED or self.now - self.reachable_since[number] > SETTLED)

    def averaged(self, mine: Replica, peer: PeerId, stage: int) -> None:
        assert isinstance(mine, Traced)
        self.averagings += 1
        theirs = self.origins.lately_of(peer, stage)
        origin = mine.origin
        if origin is None or not mine.lineage.is_same(origin, LIFETIME):
            self.accuse(f"a replica of {mine.lineage} has weights of {origin}")
        elif not any(one.is_same(origin, LIFETIME) for one in theirs):
            self.accuse(f"stage {stage}: weights of {origin} were averaged with those of {theirs}")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Day]:
    """Where the day that is lived is put: from there the product's parts are watched."""
    days: list[Day] = []
    monkeypatch.setattr(copy_keeper, "LEAST_SECONDS", 30.0)
    monkeypatch.setattr(copy_keeper, "LOOK_SECONDS", 5.0)

    def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **given: around(original, *args, **given))

    def tell_beginning(original: Any, self: FirstState, source: str) -> None:
        day, context = days[-1], self._context
        waits = [e for e in day.swarm.events if e["event"] == "waiting-for-stage"]
        mine = [e for e in waits if peer_of(day.swarm.nodes[e["node"]]) == context.me
                if e["node"] in day.swarm.nodes]  # fmt: skip
        waited = any(e["stage"] == context.stage and day.now >= e["until"] for e in mine)
        day.note(f"stage {context.stage} is begun by …{context.me[-6:]}")
        day.began(context, waited)
        original(self, source)
        assert isinstance(self._replica, Traced)
        self._replica.comes_from(self._replica.lineage)

    async def take(original: Any, self: FirstState) -> bool:
        taken: bool = await original(self)
        if taken and isinstance(self._replica, Traced) and self._replica.origin is None:
            self._replica.comes_from(self._replica.lineage)  # the run's seed
        return taken

    async def copied(original: Any, self: Checkpoints) -> Checkpoint:
        checkpoint: Checkpoint = await original(self)
        if isinstance(self._replica, Traced):
            days[-1].origins.register(checkpoint.state.phi, self._replica.origin)
        return checkpoint

    def record(original: Any, self: PairAverager, own: Any, partner: PeerId | None, sample: Any) -> None:
        if partner is not None:
            days[-1].averaged(self._replica, partner, self._context.stage)
        original(self, own, partner, sample)

    def save(original: Any, self: StateDirectory, run_id: str, checkpoint: Checkpoint) -> None:
        original(self, run_id, checkpoint)
        days[-1].saved(self.path, checkpoint.stage, checkpoint.state.lineage, checkpoint.state.step)

    def replace_whole(original: Any, path: Path, *contents: Any) -> None:
        if days and path.parent in days[-1].full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(path, *contents)

    wrap(FirstState, "_tell_beginning", tell_beginning)
    wrap(FirstState, "_take", take)
    wrap(Checkpoints, "_copied", copied)
    wrap(PairAverager, "_record", record)
    wrap(StateDirectory, "save_checkpoint", save)
    wrap(state_directory, "replace_whole", replace_whole)
    return days
