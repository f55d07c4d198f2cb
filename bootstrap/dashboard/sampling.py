"""The samples that a page takes while somebody watches: texts by the present weights, and who gave how much."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from statistics import median

from bootstrap.dashboard.board import Board, Giver, Sample
from bootstrap.dashboard.collector import Audience
from bootstrap.export.tokenizer import ModelTokenizer, tokenizer_file, tokenizer_of_run
from bootstrap.generation.decoding import Decoding
from bootstrap.generation.swarm_answer import SwarmAnswer
from bootstrap.generation.writing import first_tokens
from bootstrap.inspect.contributors import contributions
from bootstrap.inspect.observer import Observer, Sighting
from node.watch.words import LONGEST_NAME, word
from protocol.errors import JoinError, NolocoError, legible
from protocol.ground import PeerId
from protocol.records.receipts import Contribution

logger = logging.getLogger(__name__)

SECONDS = 60.0  # between two texts, and between two sums of receipts
LOOK_SECONDS = 2.0  # between two looks for somebody to ask, while there is nobody
ANSWER_SECONDS = 60.0  # that a text may take in all
PROMPT = "The "
TOKENS = 48
MOST_LIKELY = 50  # tokens to choose from: the others' logits do not travel
TEMPERATURE = 0.8
MOST_CHARACTERS = 600
MOST_GIVERS = 100
# members that are asked for receipts: each has 256 at most, and to check one takes 0.3 ms of the processor
MOST_ASKED = 64


class Texts:
    """Has one random route of a swarm go on with a few words. Mutable state: the tokenizer, once it is here.

    A route that fails leaves nothing behind: another one is tried a minute later. While a stage has nobody that
    answers, nobody is asked.
    """

    def __init__(self, observer: Observer, board: Board, audience: Audience) -> None:
        self._observer = observer
        self._board = board
        self._audience = audience
        self._tokenizer: ModelTokenizer | None = None
        self._rng = random.Random(observer.transport.peer_id)

    async def run(self) -> None:
        """Take a text a minute for ever while somebody watches, each within `ANSWER_SECONDS` or not at all."""
        while True:
            await self._audience.somebody()
            if route := self._route():
                try:
                    async with asyncio.timeout(ANSWER_SECONDS):
                        self._board.note_sample(await self._sample(route, PROMPT))
                except (NolocoError, TimeoutError) as failure:
                    logger.debug("No text was written: %s", failure)
            await asyncio.sleep(SECONDS if route else LOOK_SECONDS)

    async def write(self, prompt: str) -> Sample:
        """Let a random route go on with a prompt.

        Raises `NolocoError` when it fails, a stage has nobody that answers, or nobody gives the run's tokenizer.
        """
        if not (route := self._route()):
            raise JoinError(
                "No text can be written at present: a stage has nobody that answers. Try again later."
            )
        return await self._sample(route, prompt)

    async def _sample(self, route: Sequence[PeerId], said: str) -> Sample:
        """Let a route go on with a text. Raises as `write`."""
        manifest = self._observer.manifest
        if self._tokenizer is None:
            self._tokenizer = tokenizer_of_run(manifest, await tokenizer_file(self._observer, ""))
        tokenizer = self._tokenizer
        prompt = first_tokens(tokenizer, said, tokenizer.context)
        # of the replicas that write: what others tell of themselves is no matter here
        step = round(median(row["step"] for row in self._board.rows() if row["id"] in route))
        choice = Decoding(
            TOKENS, TEMPERATURE, min(MOST_LIKELY, manifest.model.vocab_size), seed=self._rng.getrandbits(31)
        )
        answer = SwarmAnswer(self._observer, route)
        tokens = [token async for token in answer.tokens(prompt, choice, tokenizer.end)]
        text = tokenizer.text_of(prompt + tokens)
        now = self._observer.transport.now()
        return Sample(
            now, step, max(answer.rounds, default=0), self._board.now.loss, harmless(text, MOST_CHARACTERS)
        )

    def _route(self) -> Sequence[PeerId]:
        """A replica of each stage that has its weights and answers, drawn at random; empty where a stage has none."""
        view, now = self._observer.view, self._observer.transport.now()
        answering = {seen.member.peer for seen in answering_at(self._board)}
        there = [
            [peer for peer in view.holding(stage, now) if peer in answering]
            for stage in range(self._observer.manifest.stages)
        ]
        return [self._rng.choice(peers) for peers in there] if all(there) else ()


class Givers:
    """Adds up, once a minute while somebody watches, what members have signed for each other.

    Of more than `MOST_ASKED` members that many are asked, the same ones each time, so that no sum jumps. Mutable
    state: who they are.
    """

    def __init__(self, observer: Observer, board: Board, audience: Audience) -> None:
        self._observer = observer
        self._board = board
        self._audience = audience
        self._rng = random.Random(observer.transport.peer_id)
        self._chosen: list[PeerId] = []

    async def run(self) -> None:
        """Add up contributions for ever. Members that do not answer are left out."""
        while True:
            await self._audience.somebody()
            if asked := self._asked():
                found = await contributions(self._observer, asked)
                self._board.note_givers(givers_of(found))
            await asyncio.sleep(SECONDS if asked else LOOK_SECONDS)

    def _asked(self) -> list[Sighting]:
        there = {seen.member.peer: seen for seen in answering_at(self._board)}
        self._chosen = [peer for peer in self._chosen if peer in there]
        others = [peer for peer in there if peer not in self._chosen]
        free = MOST_ASKED - len(self._chosen)
        self._chosen += self._rng.sample(others, min(free, len(others)))
        return [there[peer] for peer in self._chosen]


def answering_at(board: Board) -> list[Sighting]:
    """Members that have answered and are not silent."""
    return [seen for seen in board.sightings() if seen.stats is not None]


def givers_of(found: Sequence[Contribution]) -> list[Giver]:
    """The givers, the largest first, `MOST_GIVERS` at most; shares are of all that is signed for."""
    total = sum(one.tokens for one in found) or 1
    return [
        Giver(
            word(one.name, LONGEST_NAME),
            one.peer,
            one.tokens,
            one.tokens / total,
            one.rounds,
            one.signers,
        )
        for one in found[:MOST_GIVERS]
    ]


def harmless(text: str, most: int) -> str:
    """The text that strangers wrote, at most so many characters of it, control characters as their codes."""
    return legible(text[:most])[:most]
