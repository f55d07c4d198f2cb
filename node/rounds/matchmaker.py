"""Finding the partner of a round over the network: drives `PartnerSearch` with messages, timers and inner steps."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from node.context import Context
from node.model.replica import Replica
from node.rounds.handshake import Handshake, meeting_in
from node.rounds.kin import Kin
from node.rounds.meeting import Meeting, Pair, Proposal, Refusal
from node.rounds.pace import Other, Standing, others_among, steps_of_round
from node.rounds.partner_search import PartnerSearch
from node.rounds.search_events import (
    Agreed,
    AskedToSitOut,
    Asker,
    AskForRecord,
    Event,
    Lane,
    LastSearchBegan,
    LastSearchEnded,
    LastSearchStopped,
    LookAround,
    Looked,
    PairsDropped,
    PartnerReady,
    PartnerReleased,
    ProposalAnswered,
    ProposalLost,
    Proposed,
    ReadyAnswered,
    RecordArrived,
    Reply,
    Retired,
    RoundBegan,
    RoundEnded,
    SendProposal,
    SendReady,
    SendRelease,
    SendSitOut,
    SetTimer,
    StepDone,
    StepJudged,
    StepsCounted,
    StopTimer,
    Suspect,
    TimerFired,
)
from protocol.errors import NolocoError, Refused
from protocol.ground import PeerId
from protocol.messages import Done
from protocol.messages.training import Accept, Propose, Ready, Release, SitOut
from protocol.rpc.rpc import Answer, Request, Rpc
from protocol.supervision import Work, all_of

logger = logging.getLogger(__name__)


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
        self._agreed = agreed
        self._avoid = avoid
        self._handshake = Handshake(context.rpc)
        outer = context.manifest.outer
        self._search = PartnerSearch(
            context.me, outer.inner_steps, outer.window, rng, self._now(), len(replica.fragments)
        )
        self._timer: asyncio.Task[None] | None = None
        self._last_search_ended = asyncio.Event()
        self._tasks = context.supervisor.group()
        self._kin = Kin(context, replica)
        self.standing = Standing(context.manifest.limits.record_lifetime, len(replica.fragments))
        # why this replica should download its stage before it averages; empty when it belongs
        self.behind = ""

    # --- what it has found --------------------------------------------------------------------

    @property
    def accepting(self) -> bool:
        return self._search.accepting

    @property
    def pair(self) -> Pair | None:
        """The partner agreed on for this round."""
        return self._search.pair

    @property
    def partner_trains(self) -> bool:
        """True if the partner of this round still takes inner steps, as far as it has said."""
        return self._search.partner_trains

    @property
    def next_fragment(self) -> int | None:
        """The fragment that a round alone is of; None for all."""
        return self._search.next_fragment

    @property
    def has_agreed(self) -> bool:
        """True if there is a partner, for this round or the next."""
        return self._search.has_agreed

    @property
    def search_seconds(self) -> float | None:
        """Seconds from the first proposal of this round to the yes; None without one."""
        return self._search.search_seconds

    @property
    def partner_by(self) -> float:
        """See `Pairing.partner_by`."""
        self._count_steps()
        return self._search.partner_by(self._now())

    @property
    def must_end(self) -> bool:
        self._count_steps()
        return not self.behind and self._search.must_end(self._now())

    @property
    def others_serve(self) -> bool:
        """True if there are others in the stage that are not known to have finished."""
        closed_with = self._search.closed_with
        others = (peer for peer in self._serving() if peer not in closed_with and peer != self._context.me)
        return any(map(self._kin.is_kin, others))

    def is_expected(self, name: str, peer: PeerId) -> bool:
        """Return whether `peer` may send contributions under this pair's name, for this round or the next."""
        return self._search.holds(Pair(peer, name))

    # --- the rhythm of a round ----------------------------------------------------------------

    def step_done(self, seconds: float) -> None:
        """Note an inner step of `seconds`: look for a partner, or tell it that this round must end soon."""
        self._handle(StepDone(seconds))
        now, pair, others = self._now(), self.pair, self._others()
        round_seconds = self._search.round_seconds(now)
        self.standing.step_done(now, self._replica.round, self._rate(), round_seconds, others)
        self.standing.note_loss(now, self._context.counters.losses.recent(), others)
        in_doubt = pair is not None and self._is_in_doubt(pair.partner)
        self._handle(StepJudged(self._is_behind(), in_doubt, self._handshake.round_trip))

    def _is_behind(self) -> bool:
        others = self._others()
        self.behind = self.standing.why_behind(self._now(), self._replica.round, self._rate(), others)
        return bool(self.behind)

    def _is_in_doubt(self, peer: PeerId) -> bool:
        """Return whether the peer was seen to fail, or says that it does not train any more."""
        context = self._context
        members = context.view.members(context.stage, context.transport.now())
        return any(member.peer == peer for member in members) and peer not in self._serving()

    def _rate(self) -> float:
        return self._context.throughput.tokens_per_second()

    def _others(self) -> list[Other]:
        """The other replicas of this one's lineage that train, as their records show them."""
        return others_among(self._kin.members(), self._context.me)

    def _serving(self) -> list[PeerId]:
        return self._context.view.serving(self._context.stage, self._context.transport.now())

    async def seek_last(self) -> None:
        """Look for a partner for a round after the last step of a run, until there is one that knows of it.

        None is looked for where one is agreed on for the next round: it may be waiting there.
        """
        self._last_search_ended.clear()
        self._handle(LastSearchBegan())
        try:
            await self._last_search_ended.wait()
        finally:
            self._handle(LastSearchStopped())

    async def conclude(self) -> Pair | None:
        """Conclude the round, which is at its end: return the partner if there is one. Waits for nothing.

        A proposal that is not answered yet is withdrawn once it is. When the partner has not heard of the pair,
        or not any more, it refuses this replica's contribution.
        """
        self._handle(RoundEnded())
        return self.pair

    def begin_round(self) -> None:
        """Begin the next round, perhaps with a partner agreed on before."""
        rates = [other.tokens_per_second for other in self._others()]
        outer = self._context.manifest.outer
        self._handle(RoundBegan(steps_of_round(outer.pace, outer.inner_steps, self._rate(), rates)))

    # --- driving the search -------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _count_steps(self) -> None:
        """Report the inner steps of the round, which also a download or a restart may change."""
        if self._search.step_count != self._replica.steps_in_round:
            self._search.handle(StepsCounted(self._replica.steps_in_round), self._now())

    def _handle(self, event: Event) -> Meeting | Refusal | None:
        """Hand the event to the search and do what it asks for. Return its answer to another replica's request."""
        self._count_steps()
        answer = None
        for action in self._search.handle(event, self._now()):
            match action:
                case SendProposal(proposal):
                    self._spawn(self._report(partial(self._ask, proposal), ProposalLost(proposal)))
                case SendReady(pair):
                    self._spawn(
                        self._report(partial(self._tell_ready, pair), ReadyAnswered(pair, is_known=True))
                    )
                case AskForRecord(proposal, named):
                    self._spawn(self._report(partial(self._hear, proposal, named), RecordArrived(proposal)))
                case SendRelease(pair):
                    self._spawn(self._handshake.release(pair))
                case SendSitOut(peer, meeting):
                    self._spawn(self._handshake.sit_out(peer, self._context.stage, meeting))
                case SetTimer(seconds):
                    self._stop_timer()
                    self._timer = self._spawn(self._wait(seconds))
                case StopTimer():
                    self._stop_timer()
                case Suspect(peer):
                    self._context.view.suspect(peer)
                case Agreed(pair):
                    self._agreed(pair)
                case LookAround(lane):
                    self._handle(self._look(lane))
                case Reply(reply):
                    answer = reply
                case LastSearchEnded():
                    self._last_search_ended.set()
        return answer

    def _spawn(self, work: Work[None]) -> asyncio.Task[None]:
        return self._tasks.spawn(work, "finding a partner", "This round may end alone.")

    async def _report(self, work: Callable[[], Work[Event]], otherwise: Event) -> None:
        """Hand the event that the work returns to the search; `otherwise` if it fails, so that the search goes on."""
        try:
            event = await work()
        except Exception:
            self._handle(otherwise)
            raise
        self._handle(event)

    async def _wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._timer = None
        self._handle(TimerFired())

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, lane: Lane) -> Looked:
        """See which replicas serve the stage and may be averaged with."""
        serving = self._serving()
        willing = [peer for peer in self._kin.among(serving) if not self._avoid(peer)]
        through = set(filter(self._context.transport.goes_through_others, willing))
        return Looked(lane, willing, self._context.view.shares(serving), self._handshake.round_trip, through)

    async def _ask(self, proposal: Proposal) -> Event:
        replica, stage = self._replica, self._context.stage
        try:
            answer = await self._handshake.propose(proposal, stage, replica.round, replica.lineage.beginning)
        except NolocoError as failure:
            logger.debug("Proposal to %s failed: %s", proposal.pair.partner[-8:], failure)
            return ProposalLost(proposal)
        return ProposalAnswered(proposal, answer)

    async def _tell_ready(self, pair: Pair) -> Event:
        return ReadyAnswered(pair, await self._handshake.ready(pair))

    async def _hear(self, proposal: Proposal, named: PeerId) -> Event:
        asked = proposal.pair.partner
        # no longer than the answer to a proposal may take: a peer that names another one could hold up searches
        await self._context.hear_about(asked, named, self._handshake.deadline_of(asked))
        return RecordArrived(proposal)

    # --- what others ask ----------------------------------------------------------------------

    def serve(self, rpc: Rpc) -> None:
        rpc.handle(
            Propose.answered_by(self.on_propose),
            Ready.answered_by(self.on_ready),
            Release.answered_by(self.on_release),
            SitOut.answered_by(self.on_sit_out),
        )

    async def on_propose(self, request: Request[Propose]) -> Answer[Accept]:
        peer, message, view = request.peer, request.message, self._context.view
        is_kin = message.beginning == self._replica.lineage.beginning and self._kin.is_kin(peer)
        asker = Asker(
            serves_other_stage=message.stage != self._context.stage,
            is_quarantined=self._avoid(peer),
            has_other_version=not view.can_average(peer),
            has_other_lineage=not is_kin,
            must_wait=self._must_look_first(peer, message.round),
            shares=view.shares(self._serving()),
        )
        answer = self._handle(Proposed(Pair(peer, message.pair), meeting_in(message), asker))
        accepted = _unless_refused(answer)
        assert accepted is not None
        return Answer(Accept(round=self._replica.round, **asdict(accepted)))

    def _must_look_first(self, peer: PeerId, round_: int) -> bool:
        """Return whether to average with nobody, or not with this one: records may ask for a download first."""
        if not self.standing.is_alone:
            return bool(self.behind)
        is_unknown = not self._context.view.knows(peer)
        return self._is_behind() or (is_unknown and self.standing.is_far_ahead(round_, self._replica.round))

    async def on_ready(self, request: Request[Ready]) -> Answer[Done]:
        _unless_refused(self._handle(PartnerReady(Pair(request.peer, request.message.pair))))
        return Answer(Done())

    async def on_release(self, request: Request[Release]) -> Answer[Done]:
        self._handle(PartnerReleased(Pair(request.peer, request.message.pair)))
        return Answer(Done())

    async def on_sit_out(self, request: Request[SitOut]) -> Answer[Done]:
        message = request.message
        is_other = message.stage != self._context.stage
        _unless_refused(self._handle(AskedToSitOut(meeting_in(message), is_other)))
        return Answer(Done())

    # --- the end ------------------------------------------------------------------------------

    async def let_go(self) -> None:
        """Let whoever expected to meet this replica look for another partner."""
        await self._release_all(PairsDropped())

    async def retire(self) -> None:
        """End all rounds, also those that others expect."""
        await self._release_all(Retired())

    async def _release_all(self, event: Event) -> None:
        """Hand the event to the search, and wait until the partners that it releases know of it."""
        actions = self._search.handle(event, self._now())
        if StopTimer() in actions:
            self._stop_timer()
        releases = [action.pair for action in actions if isinstance(action, SendRelease)]
        await all_of(*map(self._handshake.release, releases))

    async def close(self) -> None:
        await self.retire()
        await self._tasks.close()


def _unless_refused(answer: Meeting | Refusal | None) -> Meeting | None:
    """Return the answer to a request, or raise the refusal that it is."""
    if isinstance(answer, Refusal):
        raise Refused(answer.code, answer.reason)
    return answer
