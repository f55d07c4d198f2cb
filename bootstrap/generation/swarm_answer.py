"""An answer from a running swarm: token after token through one replica of each stage, drawn from its logits."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import torch

from bootstrap.generation.decoding import Decoding
from bootstrap.inspect.observer import (
    PAUSE_SECONDS,
    ROUTE_TRIES,
    Attempt,
    Observer,
    first_of,
    route_patience,
)
from protocol.codecs.codec import encode
from protocol.errors import (
    DeadlineExceeded,
    JoinError,
    NolocoError,
    PeerUnreachable,
    Refused,
    WireError,
    later,
)
from protocol.ground import PeerId
from protocol.messages.training import Predict

MOST_LOGIT = 1e30  # of either sign: the likeliest token's, over any temperature in use, stays finite
FIRST_PATIENCE = (
    15.0  # seconds for a first answer, which may wait behind training, until another route is asked, too
)
USUAL, LEAST_PATIENCE = 3.0, 5.0  # the same for a later one: times the longest answer, and seconds at least
FORGIVEN = 5  # times that the route may forget what it has seen; then all tokens go each time, unasked
_ONE_SET = "Generate from an export, or when the run is complete, for one set of weights throughout."


@dataclass
class _Way:
    """A route and the tokens of the answer that its peers remember.

    Mutable state: how many tokens they remember, and how often they had forgotten them. `name` is the answer's name
    on this route.
    """

    route: Sequence[PeerId]
    name: str = field(default_factory=lambda: secrets.token_hex(16))
    remembered: int = 0  # tokens
    forgotten: int = 0  # how often it had not remembered them


class SwarmAnswer:
    """Generates tokens through one route of a running swarm at a time.

    When the route fails, or an answer takes far longer than those before, the next route is asked beside it with the
    whole text; the first that answers goes on.

    Mutable state: the routes, the one in use first; the longest answer; which rounds the replicas in use are in;
    whether it was told how to get one set of weights.

    A round that ends meanwhile is told to `tell`: what follows is computed by the new weights, from the first
    token of the text on. So is another route.
    """

    def __init__(
        self,
        observer: Observer,
        route: Sequence[PeerId],
        tell: Callable[[str], None] = lambda sentence: None,
        others: Sequence[Sequence[PeerId]] = (),
    ) -> None:
        self._observer = observer
        self._ways = [_Way(one) for one in (route, *others)]
        self._tell = tell
        self._longest: float | None = None  # seconds that an answer took so far
        self.rounds: list[int] = []
        self._is_advised = False

    async def tokens(
        self, prompt: Sequence[int], decoding: Decoding, end_of_text: int | None
    ) -> AsyncIterator[int]:
        """The tokens after `prompt`: until the end of a text, `decoding.most_tokens`, or the run's context is full.

        Raises `JoinError` when no route is left that answers.
        """
        sequence, sampler = list(prompt), Sampler(decoding)
        context = self._observer.manifest.data.sequence_tokens
        for _ in range(min(decoding.most_tokens, context - len(prompt))):
            token = sampler.choose(await self._logits(sequence, decoding.needed))
            if token == end_of_text:
                return
            yield token
            sequence.append(token)

    async def _logits(self, sequence: list[int], top: int) -> torch.Tensor:
        """The logits [vocabulary] by the route in use or, if it fails or is slow, by the next one that answers."""
        clock = asyncio.get_running_loop().time
        began = clock()
        attempts: list[Attempt[tuple[list[int], torch.Tensor]]] = [
            lambda _, way=way: self._logits_by(way, sequence, top)  # type: ignore[misc]
            for way in self._ways
        ]
        patience = FIRST_PATIENCE if self._longest is None else max(LEAST_PATIENCE, USUAL * self._longest)
        index, (rounds, logits) = await first_of(attempts, patience)
        if index:
            given_up, self._ways = self._ways[:index], self._ways[index:]
            self._ways += given_up
            self._tell(
                f"The route {self._observer.called(given_up[0].route)} takes too long: what follows comes through "
                f"{self._observer.called(self._ways[0].route)}."
            )
            self.rounds = []
        else:
            self._longest = max(self._longest or 0.0, clock() - began)
        self._note(rounds)
        return logits

    async def _logits_by(self, way: _Way, sequence: list[int], top: int) -> tuple[list[int], torch.Tensor]:
        """The rounds of the route's replicas and the logits [vocabulary]; −∞ where they were not asked for."""
        rounds, values = await self._predict(way, sequence, top)
        vocabulary = self._observer.manifest.model.vocab_size
        logits = torch.full((vocabulary,), -torch.inf)
        if len(values) == 1 and values[0].shape == logits.shape:
            logits = values[0].float()
        elif len(values) == 2 and values[0].dim() == 1 and values[0].shape == values[1].shape:
            logits[values[1].long().clamp(0, vocabulary - 1)] = values[0].float()
        # NaN is the largest to `max`, and −∞ all of no logits: from neither can a token be drawn
        if not abs(float(logits.max())) <= MOST_LOGIT:
            raise later(
                JoinError(
                    f"The route {self._observer.called(way.route)} sends malformed logits. Run the command again."
                )
            )
        return rounds, logits

    async def _predict(
        self, way: _Way, sequence: list[int], top: int
    ) -> tuple[list[int], list[torch.Tensor]]:
        """Ask the route, with the newest token alone where it remembers the others, else with all of them."""
        failure: NolocoError | None = None
        for attempt in range(ROUTE_TRIES):
            try:
                return await self._ask(way, sequence, top)
            except Refused as refusal:
                if refusal.code == "forgotten" and way.remembered:
                    way.remembered, way.forgotten = 0, way.forgotten + 1
                    return await self._predict(way, sequence, top)
                failure = refusal
            except WireError as error:  # as it would another time
                raise later(
                    JoinError(
                        f"The route {self._observer.called(way.route)} sends malformed logits ({error}). Run "
                        "the command again."
                    )
                ) from None
            except (PeerUnreachable, DeadlineExceeded) as error:
                failure = error
            way.remembered = 0
            if attempt < ROUTE_TRIES - 1:
                await asyncio.sleep(PAUSE_SECONDS)
        raise later(
            JoinError(
                f"The route {self._observer.called(way.route)} failed ({failure}). Run the command again: it "
                "takes replicas that are there."
            )
        )

    async def _ask(self, way: _Way, sequence: list[int], top: int) -> tuple[list[int], list[torch.Tensor]]:
        position, way.remembered = way.remembered, 0  # until it answers, and for good where it is given up
        new = torch.tensor(sequence[position:], dtype=torch.int32)[None]
        hops = self._observer.hops_after_first(way.route)
        request = Predict(stage=0, route=hops, answer=way.name, position=position, top=top)
        try:
            predicted, tensors = await self._observer.rpc.call(
                way.route[0], request, [encode(new, "int32")], deadline=route_patience()
            )
        except Refused:
            way.remembered = position
            raise
        way.remembered = len(sequence) if way.forgotten < FORGIVEN else 0
        return predicted.rounds, tensors

    def _note(self, rounds: list[int]) -> None:
        if self.rounds and rounds != self.rounds:
            changed = [stage for stage, (a, b) in enumerate(zip(self.rounds, rounds, strict=False)) if a != b]
            stages = ", ".join(sorted({str(stage % self._observer.manifest.stages) for stage in changed}))
            advice = "" if self._is_advised else f" {_ONE_SET}"
            self._is_advised = True
            self._tell(f"A round ended at stage {stages}: what follows is by the new weights.{advice}")
        self.rounds = rounds


class Sampler:
    """Draws what `generate` of transformers draws from the same logits and seed."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._generator = torch.Generator().manual_seed(decoding.seed)

    def choose(self, logits: torch.Tensor) -> int:
        """A token by logits [vocabulary]; −∞ are never chosen."""
        if self._decoding.is_greedy:
            return int(torch.argmax(logits))
        probabilities = torch.softmax(left_in(logits, self._decoding), dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


def left_in(logits: torch.Tensor, decoding: Decoding) -> torch.Tensor:
    """Logits [vocabulary] over the temperature, −∞ for tokens that are left out.

    The `top_k` likeliest are left in, with those as likely as the last of them, and of these the likeliest that sum
    up to `top_p`; the likeliest always is.
    """
    logits = logits / decoding.temperature
    if decoding.top_k:
        least = torch.topk(logits, min(decoding.top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if decoding.top_p < 1:
        ascending, order = torch.sort(logits)
        falls_out = torch.softmax(ascending, dim=-1).cumsum(dim=-1) <= 1 - decoding.top_p
        falls_out[-1] = False
        logits = logits.masked_fill(falls_out.scatter(0, order, falls_out), -torch.inf)
    return logits
