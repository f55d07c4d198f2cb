"""What this node has learned of the next stage: shared by all microbatches on their way there. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence

from node.links.links import AdaptiveDeadline
from node.pipeline.answer_times import AnswerTimes
from node.pipeline.routing import Router
from node.pipeline.two_choices import TwoChoices
from protocol.ground import PeerId

LEAST_DEADLINE = 5.0  # of silence; three signs of life fit into it, and below it deadlines only cause resends


class NextStage:
    """Learns from what was sent to peers of the next stage, and names those to send the next microbatch to.

    Times are seconds of one clock of the caller's.
    """

    def __init__(
        self,
        router: Router,
        limit: float,
        stages_behind: int,
        group_of: Callable[[PeerId], Hashable] = lambda peer: peer,
        is_random: bool = True,
    ) -> None:
        """`limit` is the manifest's deadline, `stages_behind` how many stages work on an answer.

        Where routing is not `is_random`, two peers are never compared.
        """
        self.router = router
        self.choices = TwoChoices(router, group_of)
        self.times = AnswerTimes(limit, stages_behind)
        self.is_random = is_random
        self.is_leaving = False  # send what others can still take; do not wait for peers that may never come
        self._limit = limit
        self._deadline = AdaptiveDeadline(limit, LEAST_DEADLINE)

    def candidates(self, peers: Sequence[PeerId], exclude: Collection[PeerId], waited: float) -> list[PeerId]:
        """Draw at most two of `peers` that are not in `exclude`; see `Router.choose` for `waited`."""
        if self.is_random:
            return self.choices.candidates(peers, exclude, waited)
        chosen = self.router.choose(peers, exclude, waited)
        return [] if chosen is None else [chosen]

    def silence(self, has_others: bool) -> float:
        """Seconds of silence after which a peer is given up.

        With others to ask they are those of a peer that is gone, else all that the manifest allows: asked again over
        the same connection it would not be heard sooner.
        """
        return self._deadline.seconds() if has_others else self._limit

    # --- what becomes of a request ------------------------------------------------------------

    def sent(self, peer: PeerId, now: float) -> None:
        self.router.turns.taken(peer)
        self.choices.sent(peer, now)

    def answered(self, peer: PeerId, sent: float, now: float, said: float, silence: float) -> None:
        """Note an answer to what was `sent`: see `Router.note` for `said`; `silence` is the longest of the peer's."""
        self.choices.returned(peer, sent)
        self._deadline.note(silence)
        self.times.note(now - sent)
        self.router.note(peer, now - sent, said)

    def unanswered(self, peer: PeerId, sent: float) -> None:
        """Note that what was `sent` was refused, failed, or is not waited for any more."""
        self.choices.returned(peer, sent)
        self.router.turns.given_back(peer)

    def failed(self, peer: PeerId, was_silent: bool) -> None:
        """Forget how long the peer takes, and learn from a deadline that was missed."""
        if was_silent:
            self._deadline.note_missed()
        self.router.forget(peer)
