"""Finding the partner of a round: `Pairing` decides, this carries its proposals and answers over the network."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import asdict

from node.context import Context
from node.membership.turns import Turns
from node.model.replica import Replica
from node.rounds.handshake import Handshake, meeting_in
from node.rounds.kin import Kin
from node.rounds.meeting import Pair, Proposal, Refusal, RoundProgress
from node.rounds.pace import FAR_AHEAD, Other, Standing, Tempo, others_among, steps_of_round
from node.rounds.pairing import Pairing
from protocol.errors import NolocoError, Refused
from protocol.ground import PeerId
from protocol.messages import Done
from protocol.messages.training import Accept, Propose, Ready, Release, SitOut
from protocol.rpc import Answer, Request, Rpc
from protocol.supervision import Work, all_of

logger = logging.getLogger(__name__)

BUSY_SECONDS = 0.02  # before asking again: a handshake takes milliseconds


class Matchmaker:
    """Finds the partner of each round and agrees with it when the round ends.

    Peers to `avoid` are not averaged with.
    `agreed` is called once for each pair of a round: when both know of it, at the earliest when the round begins.
    """

    def __init__(
        self,
        context: Context,
        replica: Replica,
        rng: random.Random,
        agreed: Callable[[Pair], None],
        avoid: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        self._context = context
        self._replica = replica
        self._rng = rng
        self._agreed = agreed
        self._avoid = avoid
        self._handshake = Handshake(context.rpc)
        outer = context.manifest.outer
        self._turns = Turns()
        self._pairing = Pairing(context.me, outer.inner_steps, outer.window, rng)
        self._seek_timer: asyncio.TimerHandle | None = None
        self._seeking: asyncio.Task[None] | None = None
        self._beside: asyncio.Task[None] | None = None  # asks another one at the same time
        self._renewing: asyncio.Task[None] | None = None
        self._tasks = context.supervisor.group()
        self._known: Pair | None = None  # the pair that `agreed` was called for
        self._closed_with: set[PeerId] = set()  # partners that had finished, of rounds after the last step
        self._told: Pair | None = None  # the pair whose partner knows that this round ends
        self._tempo = Tempo(self._now())
        self._kin = Kin(context, replica)
        self.standing = Standing(context.manifest.limits.record_lifetime)
        # why this replica should download its stage before it averages; empty when it belongs
        self.behind = ""
        self.accepting = True
        # of this round: from the first proposal to the yes
        self.search_seconds: float | None = None
        self._sought_since: float | None = None

    @property
    def pair(self) -> Pair | None:
        """The partner agreed on for this round."""
        agreement = self._pairing.current
        return agreement.pair if agreement is not None else None

    @property
    def others_serve(self) -> bool:
        """True if there are others in the stage that are not known to have finished."""
        context = self._context
        serving = context.view.serving(context.stage, context.transport.now())
        others = (peer for peer in serving if peer not in self._closed_with and peer != context.me)
        return any(map(self._kin.is_kin, others))

    @property
    def partner_trains(self) -> bool:
        """True if the partner of this round still takes inner steps, as far as it has said."""
        agreement = self._pairing.current
        return agreement is not None and agreement.partner_step > 0

    @property
    def has_agreed(self) -> bool:
        """True if there is a partner, for this round or the next."""
        return bool(self._pairing.agreements)

    def is_expected(self, name: str, peer: PeerId) -> bool:
        """Return whether `peer` may send contributions under this pair's name, for this round or the next."""
        return self._pairing.holds(Pair(peer, name))

    # --- the rhythm of a round ----------------------------------------------------------------

    def step_done(self, seconds: float) -> None:
        """Note an inner step of `seconds`: look for a partner, or tell it that this round must end soon."""
        self._tempo.step_done(seconds, self._now())
        here, pair = self._here(), self.pair
        rate, round_seconds = self._rate(), self._pairing.bounds.nominal * here.step_seconds
        self.standing.step_done(here.now, self._replica.round, rate, round_seconds, self._others())
        self.standing.note_loss(here.now, self._context.counters.losses.recent(), self._others())
        if self._is_behind():
            return
        self._seek_when_due()
        if pair is not None and self._told != pair and self._pairing.is_ready(here):
            self._told = pair
            self._spawn(self._tell_ready(pair))
        is_in_doubt = pair is not None and self._is_in_doubt(pair.partner)
        # a partner that has done with the pair when it is asked would take it for a new one
        if self._pairing.must_renew(here, is_in_doubt) and not self._pairing.must_end(here):
            self._renew()

    @property
    def must_end(self) -> bool:
        return not self.behind and self._pairing.must_end(self._here())

    def _is_behind(self) -> bool:
        others = self._others()
        self.behind = self.standing.why_behind(self._now(), self._replica.round, self._rate(), others)
        return bool(self.behind)

    def _rate(self) -> float:
        return self._context.throughput.tokens_per_second()

    def _others(self) -> list[Other]:
        """The other replicas of this one's lineage that train, as their records show them."""
        return others_among(self._kin.members(), self._context.me)

    @property
    def partner_by(self) -> float:
        """See `Pairing.partner_by`."""
        return self._pairing.partner_by(self._here())

    async def seek_last(self) -> None:
        """Look for a partner for a round after the last step of a run, until there is one that knows of it.

        None is looked for where one is agreed on for the next round: it may be waiting there.
        """
        self._pairing.at_once = True
        self._stop_timer()
        while self.accepting and not self.has_agreed:
            if self._seeking is None or self._seeking.done():
                self._seeking = self._spawn(self._seek())
            await asyncio.wait([self._seeking])
            await self._tell_last_partner()
        await self._tell_last_partner()

    async def _tell_last_partner(self) -> None:
        pair = self.pair
        if pair is not None and self._told != pair:
            self._told = pair
            await self._tell_ready(pair)

    async def conclude(self) -> Pair | None:
        """Conclude the round, which is at its end: return the partner if there is one. Waits for nothing.

        A proposal that is not answered yet is withdrawn once it is. When the partner has not heard of the pair,
        or not any more, it refuses this replica's contribution.
        """
        self._tempo.round_ended(self._now())
        self._pairing.end_round(self._here())
        pair = self.pair
        if pair is not None and self._told != pair:
            self._told = pair
            self._spawn(self._tell_ready(pair))
        if pair is not None and self._pairing.at_once and not self.partner_trains:
            self._closed_with.add(pair.partner)
        return pair

    def begin_round(self) -> None:
        """Begin the next round, perhaps with a partner agreed on before."""
        self._tempo.round_began(self._now())
        self.search_seconds = self._sought_since = None
        self._pairing.pause = self._tempo.pause
        self._pairing.begin_round(self._next_steps())
        self._note_agreement()
        self._seek_when_due()

    def _next_steps(self) -> int:
        rates = [other.tokens_per_second for other in self._others()]
        outer = self._context.manifest.outer
        return steps_of_round(outer.pace, outer.inner_steps, self._rate(), rates)

    def _here(self) -> RoundProgress:
        return self._tempo.progress(self._now(), self._replica.steps_in_round)

    def _is_stalled(self) -> bool:
        """Return whether it should step and does not; after the last step of a run it need not."""
        return not self._pairing.at_once and self._tempo.is_stalled(self._now(), self._pairing.bounds)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # --- asking others ------------------------------------------------------------------------

    def _seek_when_due(self) -> None:
        """Begin to look for a partner at the moment that this round's dice chose."""
        is_seeking = self._seek_timer is not None or (self._seeking is not None and not self._seeking.done())
        if is_seeking or self.pair is not None or not self._tempo.is_known or not self.accepting:
            return
        delay = self._pairing.seeks_in(self._here())
        self._seek_timer = asyncio.get_running_loop().call_later(delay, self._start_seeking)

    def _start_seeking(self) -> None:
        self._seek_timer = None
        if not self._is_stalled():
            self._seeking = self._spawn(self._seek())

    def _stop_timer(self) -> None:
        if self._seek_timer is not None:
            self._seek_timer.cancel()
            self._seek_timer = None

    async def _seek(self) -> None:
        """Propose to random replicas until one agrees or all have refused; after the last step, until one agrees."""
        pairing, pause = self._pairing, BUSY_SECONDS
        while self.accepting:
            proposal = self._next_proposal()
            if proposal is not None:
                self._sought_since = self._sought_since or proposal.sent_at
                if pairing.may_ask_another and (self._beside is None or self._beside.done()):
                    self._beside = self._spawn(self._seek_beside())
                if await self._ask(proposal) != "busy":
                    continue
            elif pairing.is_asking and self._beside is not None and not self._beside.done():
                await asyncio.wait([self._beside])
                continue
            if proposal is None:
                if pairing.current is not None or pairing.is_ending or not pairing.at_once:
                    return
                pairing.forget_refusals()
                pause = min(2 * pause, max(BUSY_SECONDS, self._here().step_seconds))
            await asyncio.sleep(pause * self._rng.uniform(0.5, 1.5))

    async def _seek_beside(self) -> None:
        """Propose to others while `_seek` waits for an answer, until there is nobody to ask, or one that is busy."""
        while self.accepting:
            proposal = self._next_proposal()
            if proposal is None or await self._ask(proposal) == "busy":
                return

    def _next_proposal(self) -> Proposal | None:
        context = self._context
        serving = context.view.serving(context.stage, context.transport.now())
        crowded = self._turns.crowded(context.view.shares(serving))
        unwanted = crowded | self._closed_with
        willing = [
            peer for peer in self._kin.among(serving) if not self._avoid(peer) and peer not in unwanted
        ]
        proposal = self._pairing.propose(context.view.thinned(willing, self._rng), self._here())
        successor = self._pairing.successor(self._here())
        if successor is not None:
            self._spawn(self._handshake.sit_out(successor[0], context.stage, successor[1]))
        return proposal

    def _is_in_doubt(self, peer: PeerId) -> bool:
        """Return whether the peer was seen to fail, or says that it does not train any more."""
        view, stage, now = self._context.view, self._context.stage, self._context.transport.now()
        known = any(member.peer == peer for member in view.members(stage, now))
        return known and peer not in view.serving(stage, now)

    def _renew(self) -> None:
        """Ask the partner whether it still holds to the pair, and if it does not, look for another."""

        async def ask_again(proposal: Proposal) -> None:
            await self._ask(proposal)
            self._seek_when_due()

        proposal = self._pairing.renewal(self._here())
        if proposal is not None and (self._renewing is None or self._renewing.done()):
            self._renewing = self._spawn(ask_again(proposal))

    async def _ask(self, proposal: Proposal) -> str | None:
        """Propose; returns the code of a refusal, None when the other agreed. Without an answer it is "lost"."""
        context, pairing, pair = self._context, self._pairing, proposal.pair
        pairing.handshake = self._handshake.round_trip
        try:
            answer = await self._handshake.propose(
                proposal, context.stage, self._replica.round, self._replica.lineage.beginning
            )
        except NolocoError as failure:
            logger.debug("Proposal to %s failed: %s", pair.partner[-8:], failure)
            context.view.suspect(pair.partner)
            self._spawn(self._handshake.release(pair))  # it may have agreed
            answer = Refusal("lost")
        if isinstance(answer, Refusal):
            pairing.refused(proposal, answer, self._here())
            if answer.seeker is not None and pairing.wants(answer.seeker):
                # no longer than for its answer to a proposal: whoever names somebody could else hold searches up
                await context.hear_about(
                    pair.partner, answer.seeker, self._handshake.deadline_of(pair.partner)
                )
            return answer.code
        if not pairing.accepted(proposal, answer, self._here()):
            self._spawn(self._handshake.release(pair))
        elif self._sought_since is not None:
            self.search_seconds = self.search_seconds or self._now() - self._sought_since
        self._note_agreement()
        return None

    def _note_agreement(self) -> None:
        pair = self.pair
        if pair is not None and pair != self._known:
            self._known = pair
            self._turns.taken(pair.partner)
            self._agreed(pair)

    async def _tell_ready(self, pair: Pair) -> None:
        is_known = await self._handshake.ready(pair)
        if not is_known and not self._pairing.is_ending and self._pairing.drop(pair):
            self._seek_when_due()

    # --- what others ask ----------------------------------------------------------------------

    def serve(self, rpc: Rpc) -> None:
        rpc.handle(
            Propose.answered_by(self.on_propose),
            Ready.answered_by(self.on_ready),
            Release.answered_by(self.on_release),
            SitOut.answered_by(self.on_sit_out),
        )

    async def on_propose(self, request: Request[Propose]) -> Answer[Accept]:
        message = request.message
        if message.stage != self._context.stage or not self.accepting:
            raise Refused("other-stage" if self.accepting else "finished")
        if self._avoid(request.peer):
            raise Refused("unwanted", "contributions of this replica were out of all proportion")
        if not self._context.view.can_average(request.peer):
            raise Refused("other-version", "contributions of its version do not fit this one's")
        if message.beginning != self._replica.lineage.beginning or not self._kin.is_kin(request.peer):
            raise Refused("other-lineage", "its weights come from another beginning than this replica's")
        if self._must_look_first(request.peer, message.round):
            raise Refused("early")
        pair = Pair(request.peer, message.pair)
        serving = self._context.view.serving(message.stage, self._context.transport.now())
        crowded = self._turns.crowded(self._context.view.shares(serving))
        if not self._pairing.holds(pair) and request.peer in crowded:
            raise Refused("unwanted", "many replicas of one network averaged here lately")
        if self._is_stalled() and not self._pairing.is_ending:
            self._pairing.drop(pair)
            raise Refused("early")
        answer = self._pairing.on_proposal(pair, meeting_in(message), self._here())
        self._seek_when_due()  # it may have been a pair of ours
        if isinstance(answer, Refusal):
            raise Refused(answer.code, answer.reason)
        self._note_agreement()
        return Answer(Accept(round=self._replica.round, **asdict(answer)))

    def _must_look_first(self, peer: PeerId, round_: int) -> bool:
        """Return whether to average with nobody, or not with this one: records may ask for a download first."""
        if not self.standing.is_alone:
            return bool(self.behind)
        is_unknown = not self._context.view.knows(peer)
        return self._is_behind() or (is_unknown and round_ - self._replica.round >= FAR_AHEAD)

    async def on_ready(self, request: Request[Ready]) -> Answer[Done]:
        if not self._pairing.on_ready(Pair(request.peer, request.message.pair)):
            raise Refused("unknown-pair")
        return Answer(Done())

    async def on_release(self, request: Request[Release]) -> Answer[Done]:
        if self._pairing.drop(Pair(request.peer, request.message.pair)):
            self._seek_when_due()
        return Answer(Done())

    async def on_sit_out(self, request: Request[SitOut]) -> Answer[Done]:
        message = request.message
        if message.stage != self._context.stage or self._is_stalled():
            raise Refused("other-stage")
        if not self._pairing.on_sit_out(meeting_in(message), self._here()):
            raise Refused("engaged")
        return Answer(Done())

    # --- the end ------------------------------------------------------------------------------

    def _spawn(self, work: Work[None]) -> asyncio.Task[None]:
        return self._tasks.spawn(work, "finding a partner", "This round may end alone.")

    async def let_go(self) -> None:
        """Let whoever expected to meet this replica look for another partner."""
        pairs = [agreement.pair for agreement in self._pairing.agreements]
        for pair in pairs:
            self._pairing.drop(pair)
        await all_of(*(self._handshake.release(pair) for pair in pairs))

    async def retire(self) -> None:
        """End all rounds, also those that others expect."""
        self.accepting = False
        self._stop_timer()
        await self.let_go()

    async def close(self) -> None:
        await self.retire()
        await self._tasks.close()
