"""What a page asks for now and then, while somebody watches: texts by the present weights, and who gave how much."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence

from bootstrap.dashboard.board import Board, Giver, Sample
from bootstrap.dashboard.collector import Audience
from bootstrap.export.tokenizer import ModelTokenizer, tokenizer_file, tokenizer_of_run
from bootstrap.generation.decoding import Decoding
from bootstrap.generation.swarm_answer import SwarmAnswer
from bootstrap.generation.writing import first_tokens
from bootstrap.inspect.contributors import contributions
from bootstrap.inspect.observer import Observer
from protocol.errors import NolocoError, legible
from protocol.ground import PeerId
from protocol.receipts import Contribution

logger = logging.getLogger(__name__)

SECONDS = 60.0  # between two texts, and between two sums of receipts
RETRY_SECONDS = 10.0  # where there was none
ANSWER_SECONDS = 60.0  # that a text may take in all
PROMPT = "The "
TOKENS = 48
MOST_LIKELY = 50  # tokens to choose from: the others' logits do not travel
TEMPERATURE = 0.8
MOST_CHARACTERS = 600
MOST_GIVERS = 100
NAME_CHARACTERS = 64


class Texts:
    """Has one random route of a running swarm go on with a few words. Mutable state: the tokenizer, once it is here.

    A route that fails leaves nothing behind: another one is tried later.
    """

    def __init__(self, observer: Observer, board: Board, audience: Audience) -> None:
        self._observer = observer
        self._board = board
        self._audience = audience
        self._tokenizer: ModelTokenizer | None = None
        self._rng = random.Random(observer.transport.peer_id)

    async def run(self) -> None:
        """For ever: a text a minute while somebody watches."""
        while True:
            await self._audience.somebody()
            await asyncio.sleep(SECONDS if await self._has_sampled() else RETRY_SECONDS)

    async def _has_sampled(self) -> bool:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._sample()
        except (NolocoError, TimeoutError) as failure:
            logger.debug("No text was written: %s", failure)
            return False

    async def _sample(self) -> bool:
        route = self._route()
        if not route:
            return False
        manifest = self._observer.manifest
        if self._tokenizer is None:
            self._tokenizer = tokenizer_of_run(manifest, await tokenizer_file(self._observer, ""))
        tokenizer = self._tokenizer
        prompt = first_tokens(tokenizer, PROMPT, tokenizer.context)
        step = max((row["step"] for row in self._board.rows()), default=0)
        choice = Decoding(
            TOKENS, TEMPERATURE, min(MOST_LIKELY, manifest.model.vocab_size), seed=self._rng.getrandbits(31)
        )
        answer = SwarmAnswer(self._observer, route)
        tokens = [token async for token in answer.tokens(prompt, choice, tokenizer.end)]
        text = tokenizer.text_of(prompt + tokens)
        now = self._observer.transport.now()
        self._board.note_sample(Sample(now, step, self._board.now.loss, harmless(text, MOST_CHARACTERS)))
        return True

    def _route(self) -> Sequence[PeerId]:
        """A replica of each stage that serves, drawn at random; empty where a stage has none."""
        view, now = self._observer.view, self._observer.transport.now()
        serving = [view.serving(stage, now) for stage in range(self._observer.manifest.stages)]
        return [self._rng.choice(peers) for peers in serving] if all(serving) else ()


class Givers:
    """Adds up, once a minute while somebody watches, what members have signed for each other."""

    def __init__(self, observer: Observer, board: Board, audience: Audience) -> None:
        self._observer = observer
        self._board = board
        self._audience = audience

    async def run(self) -> None:
        """For ever. Members that do not answer are left out."""
        while True:
            await self._audience.somebody()
            found = await contributions(self._observer, self._board.sightings())
            self._board.note_givers(givers_of(found))
            await asyncio.sleep(SECONDS if found else RETRY_SECONDS)


def givers_of(found: Sequence[Contribution]) -> list[Giver]:
    """The most first, `MOST_GIVERS` at most; shares are of all that is signed for."""
    total = sum(one.tokens for one in found) or 1
    return [
        Giver(
            harmless(one.name, NAME_CHARACTERS),
            one.peer,
            one.tokens,
            one.tokens / total,
            one.rounds,
            one.signers,
        )
        for one in found[:MOST_GIVERS]
    ]


def harmless(text: str, most: int) -> str:
    """What strangers wrote, at most so many characters, control characters as their codes."""
    return legible(text[:most])[:most]
