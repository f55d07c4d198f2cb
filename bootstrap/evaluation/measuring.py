"""What `noloco eval` does: the text to measure on, the losses on it, and what is said of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from bootstrap.display import bars
from bootstrap.evaluation.losses import MeasuredText, evaluate_route, held_out_text, model_loss, text_of_files
from bootstrap.export.order import FACTS
from bootstrap.export.tokenizer import tokenizer_file, transformers_tokenizer
from bootstrap.generation.exported import load_exported
from bootstrap.inspect.observer import visit
from node.data.opening import LOCAL, DataPlan, open_data
from node.data.sources import places_of
from node.data.tokenizer import FILE_NAME
from node.machine.processes import in_background
from protocol.errors import DataError, ManifestError
from protocol.manifest import BYTES, Manifest, manifest_from

HELD_OUT_SEQUENCES = 256
AT_ONCE = 8  # sequences that an export computes together


@dataclass(frozen=True)
class WantedLosses:
    """What to measure on."""

    data: tuple[str, ...]
    field: str
    held_out: bool
    sequences: int | None
    cache: Path  # of documents

    def text(
        self,
        manifest: Manifest | None,
        raw: bytes | None,
        tokenizer: PreTrainedTokenizerBase,
        tokens: int,
        at_once: int,
    ) -> MeasuredText:
        """Files whole, or what the run of the `manifest` holds out. Raises `DataError` with what to do."""
        if self.data and not self.held_out:
            return text_of_files(places_of(self.data), self.field, tokenizer, tokens, at_once, self.sequences)
        if manifest is None:
            raise DataError(
                "This model does not tell which text its run holds out: name text with --data FILE."
            )
        if not self.data and manifest.data.source == LOCAL:
            raise DataError(
                "This run trains on its volunteers' own text: name some with --data FILE, with --held-out for the "
                "part of it that nobody trains on."
            )
        corpus = open_data(manifest, DataPlan(self.data, self.field, self.cache), raw)
        return held_out_text(manifest, corpus, self.sequences or HELD_OUT_SEQUENCES, tokenizer)


async def evaluate_swarm(join: list[str], wanted: WantedLosses, every_replica: bool, own: str) -> None:
    async with visit(join) as observer:
        manifest = observer.manifest
        raw = await tokenizer_file(observer, own)
        text = await in_background(
            "data",
            wanted.text,
            manifest,
            raw,
            transformers_tokenizer(manifest, raw),
            manifest.data.sequence_tokens,
            manifest.inner.sequences,
        )
        routes = await observer.routes()
        losses = []
        for route in routes if every_replica else routes[:1]:
            with bars() as shown:
                loss = await evaluate_route(
                    observer, text, route, lambda done, total: shown.update("Evaluating", done, total)
                )
            print(f"{loss}, through {_short(route)}")
            losses.append(loss.nats)
        if len(losses) > 1:
            print(f"{sum(losses) / len(losses):.4f} nats per token, mean over {len(losses)} routes")


def evaluate_export(directory: Path, wanted: WantedLosses) -> None:
    loaded = load_exported(directory)
    manifest = _manifest_of(directory)
    is_bytes = manifest is None or manifest.data.tokenizer == BYTES
    raw = None if is_bytes else (directory / FILE_NAME).read_bytes()
    text = wanted.text(manifest, raw, loaded.tokenizer, loaded.context, AT_ONCE)
    with bars() as shown:
        loss = model_loss(loaded.model, text, lambda done, total: shown.update("Evaluating", done, total))
    print(f"{loss}, by {directory}")


def _manifest_of(directory: Path) -> Manifest | None:
    """The run's, as an export tells it."""
    try:
        return manifest_from(json.loads((directory / FACTS).read_text(encoding="utf-8"))["manifest"])
    except (OSError, ValueError, KeyError, TypeError, ManifestError):
        return None


def _short(route: Sequence[str]) -> str:
    return " → ".join(peer[-8:] for peer in route)
