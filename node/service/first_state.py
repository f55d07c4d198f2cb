"""Finds a replica's first state: what it saved, other replicas', or what the run starts from.

A stage that has had steps is not begun anew while its state may come back: a first replica waits for it, and says for
whom. What this node has saved of the stage, also long ago, comes before the run's seed.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from itertools import count, pairwise
from statistics import median, median_low

from node.context import Context
from node.membership.discovery import Discovery
from node.membership.moving import OwnersPlan
from node.membership.past import Remembered
from node.membership.view import Member
from node.model.compute import Priority
from node.model.pretrained import Pretrained, load_stage
from node.model.replica import Replica
from node.service.trainer import Trainer
from node.state.checkpoints import Checkpoints
from node.state.copies import OfferedCopy, StageCopies, is_recent
from node.state.transfer import FRESH_ROUNDS
from node.storage.checkpoint_files import Checkpoint
from node.watch.words import clock_time, waiting_sentence
from protocol.errors import CheckpointError, JoinError, NolocoError
from protocol.messages.peers import Awaited
from protocol.records.lineage import Lineage

DOWNLOADS = 3  # tries to get the state of the stage that a node moves to
PAUSE_SECONDS = 5.0  # between them
FEW_STEPS = 20  # that a stage may have had and nobody is waited for
COPIES_EVERY = 6  # such pauses, others are asked whether they have a copy
COPIES_TRIED = 8  # one after another, of other peers each: whoever offers the furthest may give none
# a checkpoint from which the live replicas have gone on for so many is not worth going on from
OLD_ROUNDS = 4


class FirstState:
    """Gives a replica its first state; the trainer downloads that of live replicas.

    `pretrained` names the checkpoint that the volunteer has of what the run starts from; empty for none. With
    `begin_anew` nobody is waited for: what this node saved counts, and without that the stage begins anew.

    Mutable state: whom it waits for.
    """

    def __init__(
        self,
        context: Context,
        replica: Replica,
        checkpoints: Checkpoints,
        discovery: Discovery,
        trainer: Trainer,
        copies: StageCopies,
        plan: OwnersPlan,
        pretrained: str,
        begin_anew: bool,
    ) -> None:
        self._context = context
        self._replica = replica
        self._checkpoints = checkpoints
        self._discovery = discovery
        self._trainer = trainer
        self._copies = copies
        self._plan = plan
        self._pretrained = pretrained
        self._begin_anew = begin_anew
        self.awaited: Awaited | None = None

    @property
    def _lifetime(self) -> float:
        return self._context.manifest.limits.record_lifetime

    async def load(self, checkpoint: Checkpoint | None, is_move: bool) -> bool:
        """Load the own checkpoint when it is recent, else the state of live replicas, else what the run starts from.

        False when this node was told to leave while it waited for others' weights. Raises `StateError` when the
        own checkpoint does not fit, `CheckpointError` when the one named by the volunteer is not the run's, and
        after a move `JoinError` when there are replicas and none gives its state.
        """
        events, manifest = self._context.events, self._context.manifest
        if self._pretrained and manifest.start is None:
            raise CheckpointError(
                f"Run '{manifest.name}' starts from random weights, not from {self._pretrained}. Leave "
                "--from-checkpoint out, or found a run with it: noloco found --from-checkpoint."
            )
        if is_move:
            await self._discovery.refresh()  # the node's view was that of its old stage
        if checkpoint is not None:
            if not self._holders() and await self._is_far_behind_the_past(checkpoint):
                return await self._wait_for_return(checkpoint, is_move)
            if await self._goes_on_from(checkpoint):
                return await self._restore(checkpoint)
            events.say("The saved state is far behind the other replicas; taking theirs.", "checkpoint-old")
        if await (self._take_after_move() if is_move else self._take()):
            return True
        return await self._wait_for_return(checkpoint, is_move)

    # --- the own checkpoint -------------------------------------------------------------------

    async def _goes_on_from(self, checkpoint: Checkpoint) -> bool:
        """Return whether to go on from it: it is recent, or those who serve the stage have no older history."""
        theirs = await self._lineage_of_holders()
        if theirs is None:
            return True
        own = self._dated(checkpoint, theirs)
        if theirs.is_same(own, self._lifetime):
            return self.rounds_missed(checkpoint) < OLD_ROUNDS
        return own.is_before(theirs, self._lifetime) or not self._is_proved(theirs, own.begun)

    async def _restore(self, checkpoint: Checkpoint) -> bool:
        await self._checkpoints.restore(checkpoint)
        theirs = await self._lineage_of_holders()
        if theirs is not None:
            self._replica.lineage = self._dated(checkpoint, theirs)
        self._note_alone()
        return True

    def _dated(self, checkpoint: Checkpoint, theirs: Lineage) -> Lineage:
        """The checkpoint's lineage; if an earlier version gave it no date and theirs began later, it began before."""
        own = checkpoint.state.lineage
        if not own.begun and checkpoint.saved and theirs.begun > checkpoint.saved:
            return Lineage(own.beginning, checkpoint.saved)
        return own

    async def _is_far_behind_the_past(self, checkpoint: Checkpoint) -> bool:
        """Return whether others had the stage so much further that they, or a copy of it, come first."""
        past = await self._past()
        return past is not None and not self._is_recent(checkpoint.state.step, checkpoint.saved, past)

    def _is_recent(self, step: int, saved: float, past: Remembered) -> bool:
        return is_recent(step, saved, past, self._context.manifest.outer.cycle_steps)

    async def _has_recent(self, checkpoint: Checkpoint | None, past: Remembered) -> bool:
        """Return whether there is a state, here or at others, so recent that nobody needs to be waited for.

        The run's seed is one for a stage that has had a few steps.
        """
        if past.step <= FEW_STEPS:
            return True
        if checkpoint is not None and self._is_recent(checkpoint.state.step, checkpoint.saved, past):
            return True
        offer = await self._copies.offered(0)
        return offer is not None and self._is_recent(offer.copy.step, offer.copy.saved, past)

    # --- the first replica --------------------------------------------------------------------

    async def _past(self) -> Remembered | None:
        """The furthest that is known of the stage, but for this node's own part in it.

        Not the latest: the record of somebody who has only come would have a stage begun anew at once.
        """
        context = self._context
        await context.ask_of_past()
        found = context.past.of(context.stage, without=context.me)
        return max(found, key=lambda one: (one.step, one.seen), default=None)

    async def _wait_for_return(self, checkpoint: Checkpoint | None, is_move: bool) -> bool:
        """Wait for somebody who has the stage's state; if nobody comes, or ever had it, begin. Returns as `load`.

        It then goes on from the own `checkpoint`, if there is one, however old. Records alone make no stage empty:
        members are asked before.
        """
        known = {member.peer for member in self._holders()}
        await self._discovery.ask_around()
        if {member.peer for member in self._holders()} - known and await self._download():
            return True
        past = await self._past()
        if past is not None and await self._has_recent(checkpoint, past):
            return await self._go_on_from_what_there_is(checkpoint, is_move)
        if past is not None and not self._begin_anew:
            until = self._context.transport.now() + self._context.manifest.limits.stage_return
            self._tell_waiting(past, until)
            try:
                if (is_found := await self._waited(checkpoint, past, until)) is not None:
                    return is_found
            finally:
                self.awaited = None
        return await self._go_on_from_what_there_is(checkpoint, is_move)

    async def _waited(self, checkpoint: Checkpoint | None, past: Remembered, until: float) -> bool | None:
        """Wait for a replica or a copy of its state. True once it is here, False when told to leave, else None."""
        for pause in count(1):
            if not await self._pause():
                return False
            if self._holders() and await self._download():
                return True
            is_over = self._context.transport.now() >= until
            if is_over or (pause % COPIES_EVERY == 0 and await self._has_recent(checkpoint, past)):
                break
            if pause % COPIES_EVERY == 1 and await self._is_released(past):
                break
        return None

    async def _is_released(self, past: Remembered) -> bool:
        """Return whether the run's owner has said, since the stage was last seen, that nobody is to wait for it."""
        context = self._context
        with contextlib.suppress(NolocoError):
            await self._plan.read()
        plan = self._plan.current
        if plan is None or context.stage not in plan.begin_anew or plan.issued < past.seen - self._lifetime:
            return False
        sentence = f"The run's owner says that stage {context.stage} need not wait for its state any longer."
        context.events.say(sentence, "wait-ended", stage=context.stage)
        return True

    async def _go_on_from_what_there_is(self, checkpoint: Checkpoint | None, is_move: bool) -> bool:
        """Take the own checkpoint or others' copy, however old; without any, begin. Returns as `load` does."""
        step = 0 if checkpoint is None else checkpoint.state.step
        for _ in range(COPIES_TRIED):
            if (offer := await self._copies.offered(step)) is None:
                break
            if await self._take_copy(offer):
                return True
        if checkpoint is not None:
            return await self._restore(checkpoint)
        return await self._begin(is_move)

    async def _take_copy(self, offer: OfferedCopy) -> bool:
        """Take a copy that others have of the stage; False if nobody gives all of it."""
        context, copy = self._context, offer.copy
        try:
            pieces = await self._copies.fetch(offer, self._trainer.note_download)
        except JoinError as failure:
            context.events.warn(str(failure), "copy-failed", stage=context.stage)
            return False
        adopt = partial(self._replica.adopt, pieces, copy.step, copy.round, offer.lineage)
        await context.compute.run(Priority.OPTIMIZER, adopt)
        self._note_alone()
        context.events.say(
            f"Nobody serves stage {context.stage} at present: going on from a copy at step {copy.step:,} that "
            f"{context.view.called(offer.peers[0])} has kept.",
            "copy-taken",
            stage=context.stage,
            step=copy.step,
            peer=offer.peers[0],
        )
        return True

    async def _pause(self) -> bool:
        """Stay announced and look for others after a while; False when this node is told to leave."""
        stopping = self._trainer.stopping
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), PAUSE_SECONDS)
        if stopping.is_set():
            return False
        await self._discovery.announce()
        await self._discovery.refresh()
        return True

    def _tell_waiting(self, past: Remembered, until: float) -> None:
        context = self._context
        self.awaited = Awaited(context.stage, past.step, past.peer, past.seen, until)
        context.events.warn(
            waiting_sentence(self.awaited, context.transport.now(), context.view.called),
            "waiting-for-stage",
            stage=context.stage,
            step=past.step,
            peer=past.peer,
            until=until,
        )
        context.events.begin(
            f"waiting for the state of stage {context.stage}",
            lambda: f"until {clock_time(until, context.transport.now())}",
        )

    async def _begin(self, is_move: bool) -> bool:
        """Begin where nobody has a state to give. Returns and raises as `load` does."""
        context, source = self._context, self._pretrained
        if context.manifest.start is None:
            source = "the run's seed"  # which the weights were made from
        elif source:
            await context.compute.run(
                Priority.SERVE, load_stage, Pretrained(source), context.manifest, context.stage, self._replica
            )
        elif is_move:
            raise JoinError(
                f"Nobody has the state of stage {context.stage}, and there is no --from-checkpoint."
            )
        else:
            return await self._wait_for_weights(context.manifest.start.name)
        self._tell_beginning(source)
        self._note_alone()
        return True

    def _tell_beginning(self, source: str) -> None:
        """Give the replica the lineage that begins now: the stage's first, or one more than the last one known."""
        context, now = self._context, round(self._context.transport.now(), 3)
        known = context.past.of(context.stage)
        last = max((one.lineage for one in known), default=None)
        lineage = self._replica.lineage = Lineage(0, now) if last is None else last.next(now)
        if last is None:
            sentence = f"First replica of stage {context.stage}: starting from {source}."
            context.events.say(sentence, "initialised", stage=context.stage)
            return
        context.events.warn(
            f"Stage {context.stage} is begun anew from {source}; it was at step {known[0].step:,} before. If "
            "somebody comes back with that state, it is taken up again.",
            "begun-anew",
            stage=context.stage,
            step=known[0].step,
            beginning=lineage.beginning,
        )

    async def _wait_for_weights(self, name: str) -> bool:
        """Wait until a replica has the weights, which this node cannot make; False when it is told to leave."""
        context = self._context
        context.events.warn(
            f"Waiting for another replica of stage {context.stage}: the run starts from '{name}', and this node was "
            "given no --from-checkpoint. With one it can be the first.",
            "no-weights",
            stage=context.stage,
        )
        context.events.begin(f"waiting for a replica of stage {context.stage} that has its weights")
        while await self._pause():
            if self._holders() and await self._download():
                return True
        return False

    def _note_alone(self) -> None:
        """Note if nobody else is seen. Should there be others whom this node cannot see, it finds out later."""
        if not self._holders():
            self._trainer.began_alone()

    # --- other replicas -----------------------------------------------------------------------

    def _holders(self) -> list[Member]:
        """The others that can give the stage's state."""
        context, now = self._context, self._context.transport.now()
        holding = {*context.view.holding(context.stage, now)} - {context.me}
        return [member for member in context.view.members(context.stage, now) if member.peer in holding]

    async def _lineage_of_holders(self) -> Lineage | None:
        """The lineage to take a state of, if there is one: the oldest that is proved, or that most holders have."""
        apart: list[Lineage] = []  # one of each
        for lineage in sorted({member.announcement.lineage for member in self._holders()}):
            if not any(lineage.is_same(other, self._lifetime) for other in apart):
                apart.append(lineage)
        if len(apart) < 2:
            return apart[0] if apart else None
        await self._context.ask_of_past()
        for older, younger in pairwise(apart):
            if self._is_proved(older, younger.begun):
                return older
        return max(apart, key=lambda one: (len(self._of(one)), -one.beginning, -one.begun))

    def _of(self, lineage: Lineage) -> list[Member]:
        return [m for m in self._holders() if m.announcement.lineage.is_same(lineage, self._lifetime)]

    def _is_proved(self, lineage: Lineage, before: float) -> bool:
        context = self._context
        return any(
            context.past.proves(context.stage, member.peer, lineage, before) for member in self._of(lineage)
        )

    async def _download(self) -> bool:
        """Take the state of those whose lineage counts; False if that failed."""
        lineage = await self._lineage_of_holders()
        return lineage is not None and await self._trainer.download(lineage)

    def rounds_missed(self, checkpoint: Checkpoint) -> float:
        """Rounds that most others ended since it was saved: no more than they are ahead, nor than time allowed them.

        A slow replica is behind them at all times, and so is its checkpoint.
        """
        context, now = self._context, self._context.transport.now()
        others = [member.announcement for member in self._of(checkpoint.state.lineage)]
        ahead = median_low([other.round for other in others] or [0]) - checkpoint.state.round
        rates = [other.tokens_per_second for other in others if other.tokens_per_second > 0]
        if not rates or not checkpoint.saved:
            return ahead
        manifest = context.manifest
        sequences = manifest.inner.microbatches * manifest.inner.sequences * manifest.outer.inner_steps
        round_seconds = sequences * manifest.data.sequence_tokens / median(rates)
        return min(ahead, (now - checkpoint.saved) / round_seconds)

    async def _take(self) -> bool:
        """Take the state from a replica; False if there is none, or none gives it.

        Where they have only just begun, it is the run's seed that this replica has, too.
        """
        holders = self._holders()
        if holders and await self._download():
            return True
        if not holders or self._context.manifest.start is not None:
            return False
        lineage = await self._lineage_of_holders()
        if lineage is None or any(one.announcement.round > FRESH_ROUNDS for one in self._of(lineage)):
            return False
        past = await self._past()
        if past is not None and not self._is_recent(0, 0.0, past):
            return False  # somebody was further: those with such records may have no state at all
        self._replica.lineage = lineage
        return True

    async def _take_after_move(self) -> bool:
        """Take the state after a move, again where nobody is found at first: a lookup may fail."""
        for attempt in range(DOWNLOADS):
            await asyncio.sleep(PAUSE_SECONDS if attempt else 0.0)
            await self._discovery.refresh()
            if self._holders() and await self._download():
                return True
        if self._holders():
            raise JoinError(f"The state of stage {self._context.stage} could not be downloaded.")
        return False
