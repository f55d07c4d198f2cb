"""Opens the data of a run: from a manifest and what a volunteer named with --data to something to train on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from node.data.batches import TrainingData
from node.data.documents import Documents, Split, StreamedDocuments, stored_documents
from node.data.hub import HubStream
from node.data.sources import hub_name
from node.data.tokenizer import Tokenizer, load_tokenizer
from node.machine.home import at_home
from protocol.errors import DataError
from protocol.run.manifest import BYTES, Manifest

LOCAL = "local"  # data.source of a run whose volunteers bring the text


@dataclass(frozen=True)
class DataPlan:
    """A volunteer's settings for the data: --data, --text-field, where documents are kept, and how many bytes.

    The rest is for advice, which differs between commands: the setting that puts the store elsewhere, and what else
    can be done where text is missing.
    """

    entries: tuple[str, ...]
    field: str
    cache: Path
    cache_size: str = ""
    cache_setting: str = "--data-cache"
    without_text: str = ", or serve another --stage"

    def flags(self) -> list[str]:
        """These settings as flags of a node's command line."""
        named = [word for entry in self.entries for word in ("--data", entry)]
        size = ["--cache-size", self.cache_size] if self.cache_size else []
        return [*named, "--text-field", self.field, "--data-cache", str(self.cache), *size]

    def require(self, manifest: Manifest) -> None:
        """Check that the run has text of its own or some is named. Raises `DataError` when neither is so."""
        if not self.entries and manifest.data.source == LOCAL:
            raise DataError(
                f"Stage 0 of run '{manifest.name}' trains on text of your own: name it with --data FILE "
                f"(globs may be used, and --data may be given several times){self.without_text}."
            )


def default_cache() -> Path:
    """Return the user's cache, where tools keep documents of no node. Raises `UserError` without a home."""
    return at_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "noloco" / "documents"


def token_name(manifest: Manifest) -> str:
    """The unit that losses of this run are given per: "byte" or "token"."""
    return "byte" if manifest.data.tokenizer == BYTES else "token"


def open_data(manifest: Manifest, plan: DataPlan, tokenizer: bytes | None) -> TrainingData:
    """The data of a run; `tokenizer` holds the run's tokenizer.json, unless bytes are its tokens.

    Reads all of it when it is seen for the first time, so call it in a thread. Raises `DataError` or
    `TokenizerError` with what to do.
    """
    return tokenised_by(load_tokenizer(tokenizer, manifest), manifest, plan)


def tokenised_by(tokenizer: Tokenizer, manifest: Manifest, plan: DataPlan) -> TrainingData:
    """Tokenise the documents by a tokenizer that is known to do what the run's does."""
    plan.require(manifest)
    return TrainingData(_documents(manifest, plan), tokenizer)


def _documents(manifest: Manifest, plan: DataPlan) -> Documents:
    data = manifest.data
    entries: Sequence[str] = plan.entries or (data.source,)
    longest, split = data.longest_document, Split(data.held_out)
    if (name := hub_name(entries)) is not None:
        return StreamedDocuments(HubStream(name, plan.field), longest, split)
    return stored_documents(
        entries, plan.field, longest, split, plan.cache, plan.cache_setting, plan.cache_size
    )
