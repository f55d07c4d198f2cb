"""The work of `noloco eval`: text to measure on; the losses of a swarm, of its first weights or of a checkpoint."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from bootstrap.display import bars
from bootstrap.export.folder import FACTS
from bootstrap.export.tokenizer import ModelTokenizer, tokenizer_file, tokenizer_of_run
from bootstrap.generation.exported import load_exported
from bootstrap.inspect.observer import (
    PAUSE_SECONDS,
    ROUTE_TRIES,
    Observer,
    first_of,
    route_patience,
    visit,
)
from node.data.batches import TrainingData
from node.data.documents import cut
from node.data.hub import Document
from node.data.opening import LOCAL, DataPlan, tokenised_by
from node.data.sources import documents_of
from node.data.tokenizer import FileTokenizer, Tokenizer, load_tokenizer
from node.data.tokenizer_files import FILE_NAME, read_tokenizer
from node.machine.limits import optional
from node.machine.processes import in_background
from node.model.pretrained import Pretrained, stage_tensors
from node.model.stage import Stage, logits_through
from node.watch.words import print_wrapped
from protocol.codecs.codec import encode
from protocol.errors import (
    DataError,
    DeadlineExceeded,
    ManifestError,
    NothingHeldOut,
    PeerUnreachable,
    Refused,
    TokenizerError,
)
from protocol.ground import PeerId
from protocol.messages.training import Evaluate, Evaluated
from protocol.run.earlier_manifests import as_read_now
from protocol.run.manifest import BYTES, Data, Manifest, manifest_from
from protocol.supervision import all_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HELD_OUT_SEQUENCES = 256
SECOND_AFTER = 15.0  # seconds in which a route evaluated nothing, after which another one is tried beside it
GIVEN_UP_AFTER = 120.0  # seconds of the same, after which a route is given up where each is to be measured
LONGEST: int = Data.model_fields["longest_document"].default  # bytes of a document where no run says it
AT_ONCE = 8  # sequences that an export computes together
IN_FLIGHT = 4

Progress: TypeAlias = Callable[[int, int], None]  # (sequences done, of how many)
Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class WantedLosses:
    """The text to measure on."""

    data: tuple[str, ...]
    field: str
    held_out: bool
    sequences: int | None
    cache: Path  # of documents
    cache_size: str = ""  # as --cache-size

    def text(
        self,
        manifest: Manifest | None,
        reader: Tokenizer | None,
        tokenizer: ModelTokenizer,
        tokens: int,
        at_once: int,
    ) -> MeasuredText:
        """The named files, or what the run of `manifest` holds out. Raises `DataError` with what to do."""
        if self.data and not self.held_out:
            longest = LONGEST if manifest is None else manifest.data.longest_document
            return text_of_files(self.data, self.field, tokenizer, tokens, at_once, self.sequences, longest)
        if manifest is None or reader is None:
            raise DataError("Which text this model's run holds out is unknown: name text with --data FILE.")
        if not self.data and manifest.data.source == LOCAL:
            raise DataError(
                "This run trains on its volunteers' own text: name some with --data FILE, with --held-out for the "
                "part of it that nobody trains on."
            )
        corpus = tokenised_by(
            reader, manifest, DataPlan(self.data, self.field, self.cache, self.cache_size, without_text="")
        )
        try:
            return held_out_text(manifest, corpus, self.sequences or HELD_OUT_SEQUENCES, tokenizer)
        except NothingHeldOut as error:
            whole = ", or leave out --held-out to measure on all of it" if self.data else ""
            raise DataError(f"{error} Name {'more ' if self.data else ''}text with --data{whole}.") from None


async def evaluate_swarm(
    join: list[str], token: str, wanted: WantedLosses, every_replica: bool, own: str
) -> None:
    async with visit(join, token) as observer:
        manifest = observer.manifest
        raw = await tokenizer_file(observer, own)
        tokenizer = tokenizer_of_run(manifest, raw)
        sizes = (manifest.data.sequence_tokens, manifest.inner.sequences)
        text = await in_background(
            "data", wanted.text, manifest, load_tokenizer(raw, manifest), tokenizer, *sizes
        )
        if every_replica:
            await evaluate_each(observer, text, await observer.routes())
            return
        with bars() as shown:
            route, loss = await evaluate_any(
                observer, text, await observer.drawn_routes(), partial(shown.update, "Evaluating")
            )
        print_wrapped(f"{loss}, through {observer.called(route)}")


async def evaluate_each(observer: Observer, text: MeasuredText, routes: Sequence[Sequence[PeerId]]) -> None:
    """Print the loss of each route. Raises as `evaluate_route` once all have failed."""
    losses, failure = list[float](), None
    for route in routes:
        try:
            with bars() as shown:
                loss = await _evaluate_while_it_answers(
                    observer, text, route, partial(shown.update, "Evaluating")
                )
        except (PeerUnreachable, DeadlineExceeded, Refused) as error:
            failure = error
            print_wrapped(f"Passed over {observer.called(route)}: {error}", on_error=True)
            continue
        print_wrapped(f"{loss}, through {observer.called(route)}")
        losses.append(loss.nats)
    if failure is not None and not losses:
        raise failure
    if len(losses) > 1:
        print_wrapped(f"{sum(losses) / len(losses):.4f} nats per token, mean over {len(losses)} routes")


async def _evaluate_while_it_answers(
    observer: Observer, text: MeasuredText, route: Sequence[PeerId], progress: Progress
) -> Loss:
    """As `evaluate_route`; raises `DeadlineExceeded`, too, when nothing was evaluated for `GIVEN_UP_AFTER`."""
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(GIVEN_UP_AFTER) as limit:

            def got_on(done: int, total: int) -> None:
                limit.reschedule(clock() + GIVEN_UP_AFTER)
                progress(done, total)

            return await evaluate_route(observer, text, route, got_on)
    except TimeoutError:
        raise DeadlineExceeded(f"it evaluated nothing for {GIVEN_UP_AFTER:.0f} s") from None


def evaluate_export(directory: Path, wanted: WantedLosses) -> None:
    loaded = load_exported(directory)
    manifest = _manifest_of(directory)
    reader = None if manifest is None else reader_of(directory, manifest)
    text = wanted.text(manifest, reader, loaded.tokenizer, loaded.context, AT_ONCE)
    with bars() as shown:
        loss = model_loss(loaded.model, text, lambda done, total: shown.update("Evaluating", done, total))
    print_wrapped(f"{loss}, by {directory}")


def reader_of(directory: Path, manifest: Manifest) -> Tokenizer:
    """The run's tokenizer by the export's file, which is written anew, so its hash is another one.

    Raises `TokenizerError` when it does something else than the run's did.
    """
    if manifest.data.tokenizer == BYTES:
        return load_tokenizer(None, manifest)
    tokenizer = FileTokenizer(read_tokenizer(str(directory)), manifest.data.end_of_text)
    known = _facts_of(directory).get("tokenizer_fingerprint")
    if known and known != tokenizer.fingerprint():
        raise TokenizerError(
            f"{directory / FILE_NAME} is not the tokenizer of run '{manifest.name}', which the export had. Export "
            "again, or copy the file from another copy of the export."
        )
    return tokenizer


def _facts_of(directory: Path) -> dict[str, object]:
    try:
        facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _manifest_of(directory: Path) -> Manifest | None:
    """The manifest of the run, as the export recorded it; None when it did not."""
    try:
        return manifest_from(as_read_now(_facts_of(directory)["manifest"])[0])
    except (ValueError, KeyError, TypeError, ManifestError):
        return None


@dataclass(frozen=True)
class Loss:
    """Cross-entropy in nats per token, over `tokens` tokens that stand for `bytes` bytes of text."""

    nats: float
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats, 700.0))  # beyond that there is no float

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers: what coding a byte of the text costs."""
        return self.nats * self.tokens / (math.log(2) * max(1, self.bytes))

    def __str__(self) -> str:
        return (
            f"{self.nats:.4f} nats per token, perplexity {self.perplexity:,.3f}, "
            f"{self.bits_per_byte:.4f} bits per byte, on {self.tokens:,} tokens ({self.bytes:,} bytes)"
        )


async def evaluate_route(
    observer: Observer, text: MeasuredText, route: Sequence[PeerId], progress: Progress = lambda *_: None
) -> Loss:
    """The loss of one replica of each stage, with their slow weights.

    Raises `PeerUnreachable`, `DeadlineExceeded` or `Refused` when a replica of the route fails for good.
    """
    slots = asyncio.Semaphore(IN_FLIGHT)
    done = 0

    async def one(inputs: torch.Tensor, labels: torch.Tensor) -> Evaluated:
        nonlocal done
        async with slots:
            evaluated = await _evaluate(observer, route, inputs, labels)
            done += inputs.shape[0]
            progress(done, text.sequences)
            return evaluated

    results = await all_of(*(one(inputs, labels) for inputs, labels in text.batches))
    return _mean([(result.loss_sum, result.tokens) for result in results], text)


async def evaluate_any(
    observer: Observer, text: MeasuredText, routes: Sequence[Sequence[PeerId]], progress: Progress
) -> tuple[Sequence[PeerId], Loss]:
    """The first of the routes that gets through the text, and its loss.

    The next route begins anew beside those before it when the last one fails, or has evaluated nothing for a while.
    Raises as `evaluate_route` once all have failed.
    """
    most = 0

    async def attempt(route: Sequence[PeerId], sign: Callable[[], None]) -> Loss:
        def got_on(done: int, total: int) -> None:
            nonlocal most
            sign()
            if done > most:
                most = done
                progress(done, total)

        return await evaluate_route(observer, text, route, got_on)

    index, loss = await first_of([partial(attempt, route) for route in routes], SECOND_AFTER)
    return routes[index], loss


async def _evaluate(
    observer: Observer, route: Sequence[PeerId], inputs: torch.Tensor, labels: torch.Tensor
) -> Evaluated:
    tensors = [encode(inputs.to(torch.int32), "int32"), encode(labels.to(torch.int32), "int32")]
    request = Evaluate(stage=0, route=observer.hops_after_first(route))
    for attempt in range(ROUTE_TRIES):
        try:
            evaluated, _ = await observer.rpc.call(route[0], request, tensors, deadline=route_patience())
            return evaluated
        except (PeerUnreachable, DeadlineExceeded, Refused):
            if attempt == ROUTE_TRIES - 1:
                raise
            await asyncio.sleep(PAUSE_SECONDS)
    raise AssertionError("the loop returns or raises")


def starting_loss(manifest: Manifest, text: MeasuredText, checkpoint: str | None = None) -> Loss:
    """The loss of the weights that every run of this manifest starts from, drawn or a checkpoint's, computed here.

    Raises `CheckpointError` when that cannot be read.
    """
    stages = [Stage(manifest, index, initialise=checkpoint is None) for index in range(manifest.stages)]
    if checkpoint is not None:
        source = Pretrained(checkpoint)
        for stage in stages:
            _begin_with(stage, stage_tensors(source, manifest, stage.index))
    return _loss_by(partial(logits_through, stages), text)


@torch.no_grad()
def _begin_with(stage: Stage, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    parameters = {stage.checkpoint_name(name): parameter for name, parameter in stage.named_parameters()}
    for name, tensor in tensors:
        parameters[name].copy_(tensor)


def model_loss(model: PreTrainedModel, text: MeasuredText, progress: Progress = lambda *_: None) -> Loss:
    """The loss of a causal language model of transformers."""
    return _loss_by(lambda inputs: model(input_ids=inputs.to(model.device)).logits, text, progress)


def checkpoint_loss(model: Path | str, text: MeasuredText) -> Loss:
    """The loss of a checkpoint in a directory or on the Hub, by plain transformers code in float32.

    Raises `MissingPackage` where transformers is not installed.
    """
    transformers = optional("transformers", "hf")
    transformers.utils.logging.disable_progress_bar()  # ours is the only one on the screen
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return model_loss(loaded.eval(), text)


@torch.no_grad()
def _loss_by(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    text: MeasuredText,
    progress: Progress = lambda *_: None,
) -> Loss:
    sums, done = [], 0
    for inputs, labels in text.batches:
        logits = logits_of(inputs).flatten(0, 1).float()
        loss = F.cross_entropy(logits, labels.flatten().to(logits.device), reduction="sum")
        sums.append((loss.item(), labels.numel()))
        done += inputs.shape[0]
        progress(done, text.sequences)
    return _mean(sums, text)


def _mean(sums: Sequence[tuple[float, int]], text: MeasuredText) -> Loss:
    tokens = sum(count for _, count in sums)
    return Loss(sum(total for total, _ in sums) / tokens, tokens, text.bytes)


@dataclass(frozen=True)
class MeasuredText:
    """`batches` of inputs and labels [sequences, tokens]; a model predicts the labels, which are `bytes` of text."""

    batches: Sequence[Batch]
    bytes: int

    @property
    def sequences(self) -> int:
        return sum(inputs.shape[0] for inputs, _ in self.batches)

    def first(self, sequences: int) -> MeasuredText:
        """The first batches, with that many sequences at most or one batch; of the bytes the same part."""
        batches, count = [self.batches[0]], self.batches[0][0].shape[0]
        for batch in self.batches[1:]:
            if (count := count + batch[0].shape[0]) > sequences:
                break
            batches.append(batch)
        part = MeasuredText(batches, 0)
        return MeasuredText(batches, round(self.bytes * part.sequences / self.sequences))


def held_out_text(
    manifest: Manifest, data: TrainingData, sequences: int, tokenizer: ModelTokenizer
) -> MeasuredText:
    """Held-out sequences, the same for everybody, in microbatches of the run's size. Raises `NothingHeldOut`."""
    batches = data.validation_batches(manifest.data.sequence_tokens, manifest.inner.sequences, sequences)
    return measured(list(batches), tokenizer)


def text_of_files(
    entries: Sequence[str],
    field: str,
    tokenizer: ModelTokenizer,
    tokens: int,
    at_once: int,
    limit: int | None = None,
    longest: int = LONGEST,
) -> MeasuredText:
    """Each document in windows of `tokens`, one after another, the last one shorter; `at_once` windows make a batch.

    `entries` are as in --data: a text file is one document; JSONL, parquet and datasets have theirs in `field`. Every
    token but a document's first is predicted once, from what is before it in its window. With `limit` no more
    windows than that. Raises `DataError` when there is nothing to predict, or a file cannot be read.
    """
    batches: list[Batch] = []
    done = 0
    for document in documents_of(entries, field):
        if limit is not None and done >= limit:
            break
        most = None if limit is None else (limit - done) * tokens + 1
        batches += _windows(_ids_of(document, tokenizer, longest, most), tokens, at_once)
        done = sum(inputs.shape[0] for inputs, _ in batches)
    if not batches:
        raise DataError(f"There is nothing to predict in {', '.join(entries)}. Name longer texts.")
    return measured(batches, tokenizer)


def measured(batches: list[Batch], tokenizer: ModelTokenizer) -> MeasuredText:
    """The batches, and how many bytes of text their labels are."""
    rows = (
        (first, row) for pair in batches for first, row in zip(*map(torch.Tensor.tolist, pair), strict=True)
    )
    return MeasuredText(batches, sum(tokenizer.byte_count(row, first[0]) for first, row in rows))


def _ids_of(
    document: Document, tokenizer: ModelTokenizer, longest: int, most: int | None
) -> NDArray[np.int64]:
    """The document's tokens as in training, where one is cut at `longest` bytes; the first `most` of them."""
    texts = (piece.decode() for piece in cut(document, longest))
    ids = chain.from_iterable(tokenizer.ids_of(text) for text in texts)
    return np.fromiter(islice(ids, most), np.int64)


def _windows(ids: NDArray[np.int64], tokens: int, at_once: int) -> Iterator[Batch]:
    """Batches of whole windows, then what is left as a window of its own."""
    stream = torch.from_numpy(ids)
    whole = max(0, len(stream) - 1) // tokens
    inputs = stream[: whole * tokens].view(whole, tokens)
    labels = stream[1 : whole * tokens + 1].view(whole, tokens)
    for first in range(0, whole, at_once):
        yield inputs[first : first + at_once], labels[first : first + at_once]
    rest = stream[whole * tokens :]
    if len(rest) > 1:
        yield rest[None, :-1], rest[None, 1:]
