"""The losses of a local swarm: where it starts, on its way, and at its end, with the export's beside it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from bootstrap.display import say
from bootstrap.evaluation.measuring import (
    Loss,
    MeasuredText,
    checkpoint_loss,
    evaluate_route,
    held_out_text,
    measured,
    starting_loss,
)
from bootstrap.export.exporting import export
from bootstrap.export.order import ExportOrder
from bootstrap.export.tokenizer import ModelTokenizer, tokenizer_of_run
from bootstrap.inspect.observer import Observer, measure_spread
from bootstrap.local.budget import EvaluationBudget
from bootstrap.local.nodes import LocalPlan
from bootstrap.local.summary import Summary
from node.data.batches import TrainingData
from node.data.opening import open_data
from node.machine.processes import in_background
from node.storage.position import Position
from protocol.errors import MissingPackage, NolocoError, NothingHeldOut
from protocol.ground import PeerId
from protocol.run.manifest import BYTES, Manifest

NOTHING_HELD_OUT = (
    "Nothing of this text is held out: it has too few documents. So the losses are on text that is trained on, and "
    "do not tell what the model makes of other text; for that, name more text with --data, or with --manifest a "
    "manifest of your own that has a larger data.held_out."
)


def text_to_measure_on(
    plan: LocalPlan, data: TrainingData, tokenizer: ModelTokenizer
) -> tuple[MeasuredText, bool]:
    """Held-out text, and True; or, where a little text has none, some of that which is trained on."""
    manifest, limit = plan.manifest, plan.validation_sequences
    try:
        return held_out_text(manifest, data, limit, tokenizer), True
    except NothingHeldOut:
        tokens, sequences = manifest.data.sequence_tokens, manifest.inner.sequences
        return measured(list(data.trained_batches(tokens, sequences, limit)), tokenizer), False


class Measuring:
    """Measures a local swarm's losses and writes them into its summary.

    Mutable state: the data and the text held out of them, the summary, which every measurement goes to, what
    measuring may take, and how far it is.
    """

    def __init__(
        self, plan: LocalPlan, summary: Summary, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` gives the seconds by which the budget is kept."""
        self._plan = plan
        self._summary = summary
        self._clock = clock
        self._began = clock()
        self._budget = EvaluationBudget()
        self._done = 0  # sequences of the measurement at hand, and how many it has
        self._total = 0
        self._data: TrainingData
        self._text: MeasuredText

    async def open(self) -> None:
        """Open the data before the nodes do, so that mistakes show at once. Raises `DataError`."""
        self._data = await in_background("data", self._open)

    def _open(self) -> TrainingData:
        plan = self._plan
        data = open_data(plan.manifest, plan.data_plan, plan.tokenizer)
        data.require(plan.manifest.data.sequence_tokens)
        tokenizer = tokenizer_of_run(plan.manifest, plan.tokenizer)
        self._text, self._summary.is_held_out = text_to_measure_on(plan, data, tokenizer)
        return data

    async def start(self, console: Console) -> None:
        """Tell the loss of the weights that all start from, and the entropies of the text."""
        plan, summary = self._plan, self._summary
        loss = await in_background("loss", self._starting_loss)
        summary.validation_loss.append((0, 0.0, round(loss.nats, 6)))
        if not plan.data and plan.manifest.data.tokenizer == BYTES:  # small enough to be counted
            found = await in_background("entropies", entropies_of, plan.manifest, self._data, self._text)
            summary.unigram_entropy, summary.bigram_entropy = found
        if not summary.is_held_out:
            say(console, NOTHING_HELD_OUT)
        text = "held-out text" if summary.is_held_out else "text that is trained on"
        console.print(f"The loss starts at {loss.nats:.3f} nats per {summary.unit} on {text}.")
        if summary.unigram_entropy is not None:
            console.print(
                f"Held-out text: unigram entropy {summary.unigram_entropy:.3f}, "
                f"bigram {summary.bigram_entropy:.3f} nats per byte."
            )

    def _starting_loss(self) -> Loss:
        began = self._clock()
        loss = starting_loss(self._plan.manifest, self._text, self._plan.from_checkpoint)
        self._budget.note(self._text.sequences, self._clock() - began)
        return loss

    def pause(self) -> float:
        """Seconds until the next measurement on the way."""
        return self._budget.pause()

    def progress(self) -> str:
        """How far the measurement at hand is; a slow machine measures on fewer sequences than it was told."""
        if not self._total:
            return ""
        whole = self._text.sequences
        of = f" (of {whole:,}: this machine is slow)" if self._total < whole else ""
        return f"{self._done:,} of {self._total:,} sequences{of}"

    def _note_done(self, before: int, done: int, _: int) -> None:
        self._done = before + done

    async def on_the_way(self, observer: Observer, tokens: int) -> None:
        """Add a point to the curve, measured along one route; a replica lost meanwhile costs the point."""
        try:
            route = (await observer.routes())[0]
            text = self._text.first(self._budget.on_the_way(self._text.sequences))
            (loss,) = await self._losses(observer, text, [route])
        except NolocoError:
            return
        self._add(tokens, loss)

    async def _losses(
        self, observer: Observer, text: MeasuredText, routes: Sequence[list[PeerId]]
    ) -> list[float]:
        """The loss of each route, one after another; what they take counts in the budget, also where one fails."""
        losses, began = list[float](), self._clock()
        self._done, self._total = 0, text.sequences * len(routes)
        try:
            for number in range(len(routes)):
                note = partial(self._note_done, number * text.sequences)
                loss = await evaluate_route(observer, text, routes[number], note)
                losses.append(loss.nats)
        finally:
            self._budget.note(max(1, self._done), self._clock() - began)
            self._total = 0
        return losses

    async def at_the_end(self, observer: Observer, tokens: int, own: Collection[PeerId]) -> None:
        """Measure the mean loss over replicas and their true spread, then the export and its loss.

        Only the swarm's `own` nodes count: others may train on, or leave meanwhile.
        """
        routes = await observer.routes(own)
        whole = self._text.sequences
        text = self._text.first(self._budget.at_the_end(whole, len(routes) + 1))  # and once by transformers
        self._summary.sequences = text.sequences, whole
        losses = await self._losses(observer, text, routes)
        self._add(tokens, sum(losses) / len(losses))
        self._summary.replica_spread = await measure_spread(observer, own)
        await self._export(observer, routes[0], losses[0], text)

    def _add(self, tokens: int, nats: float) -> None:
        seconds = self._clock() - self._began
        self._summary.validation_loss.append((tokens, round(seconds, 3), round(nats, 6)))

    async def _export(
        self, observer: Observer, route: list[PeerId], swarm_loss: float, text: MeasuredText
    ) -> None:
        directory = self._plan.directory / "export"
        order = ExportOrder(directory, route=route, validation_loss=swarm_loss)
        exported = await export(observer, order, self._plan.tokenizer)
        told: dict[str, Any] = {
            "directory": str(directory),
            "parameters": exported.parameters,
            "swarm_loss": round(swarm_loss, 8),
        }
        try:
            loss = (await asyncio.to_thread(checkpoint_loss, directory, text)).nats
        except MissingPackage as missing:
            told["not_loaded"] = str(missing)
        else:
            told |= {"loss": round(loss, 8), "difference": abs(loss - swarm_loss)}
        self._summary.export = told


VOCABULARY = 256
PSEUDO_COUNT = 0.01  # added to every count, for bytes never seen; 0.1 or 1 change the bigram's by 0.001
EPOCH_TOKENS, EPOCH_SEQUENCES = 2**16, 16  # of a batch while an epoch is counted: a mebibyte at once


def entropies_of(manifest: Manifest, data: TrainingData, text: MeasuredText) -> tuple[float, float]:
    """Return (unigram, bigram), nats per byte of `text` by the frequencies in one epoch of `data`, bytes as tokens.

    Unigram is the score of a model that has learned only how common each byte is, the first mark to pass; bigram that
    of one that sees only the byte before: below it, attention has begun to work.
    """
    trained, seen = _pairs_of_epoch(manifest, data), np.zeros((VOCABULARY, VOCABULARY), np.int64)
    for inputs, labels in text.batches:
        seen += _pairs(inputs, labels)
    alone = trained.sum(axis=0, keepdims=True), seen.sum(axis=0, keepdims=True)
    return _cross_entropy(*alone), _cross_entropy(trained, seen)


def _pairs_of_epoch(manifest: Manifest, data: TrainingData) -> NDArray[np.int64]:
    """Counts [256, 256] of how often byte j follows byte i in what is trained on."""
    wide = manifest.model_copy(
        update={
            "data": manifest.data.model_copy(update={"sequence_tokens": EPOCH_TOKENS}),
            "inner": manifest.inner.model_copy(update={"sequences": EPOCH_SEQUENCES}),
        }
    )
    counts = np.zeros((VOCABULARY, VOCABULARY), np.int64)
    for (inputs, labels), position in data.batches("", "", wide, Position(data.identity)):
        counts += _pairs(inputs, labels)
        if position.epoch:
            return counts
    return counts


def _pairs(inputs: Tensor, labels: Tensor) -> NDArray[np.int64]:
    pairs = (inputs * VOCABULARY + labels).flatten().numpy()
    return np.bincount(pairs, minlength=VOCABULARY**2).reshape(VOCABULARY, VOCABULARY)


def _cross_entropy(fitted: NDArray[np.int64], seen: NDArray[np.int64]) -> float:
    """Mean of −log p over what was `seen`, p the row-wise frequencies of `fitted`, smoothed; NaN if empty."""
    smoothed = fitted + PSEUDO_COUNT
    log_p = np.log(smoothed / smoothed.sum(axis=1, keepdims=True))
    total = seen.sum()
    return float(-(seen * log_p).sum() / total) if total else math.nan
