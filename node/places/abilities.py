"""Which stages this machine can serve: memory, disk, and text for the first one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import psutil

from node.config import NodeConfig
from node.data.corpus import Corpus, load_corpus
from node.machine.resources import memory_of_state, require_disk, require_memory, stages_that_fit
from node.state.directory import StateDirectory
from protocol.errors import DataError, UserError
from protocol.manifest import Manifest

ReadCorpus = Callable[[Manifest, Sequence[str]], Corpus]


class Abilities:
    """Mutable state: the text, once it was read, and the stages that this node would move to."""

    def __init__(
        self,
        config: NodeConfig,
        manifest: Manifest,
        state: StateDirectory | None,
        read_corpus: ReadCorpus | None = None,
    ) -> None:
        self._config = config
        self._manifest = manifest
        self._state = state
        self._read_corpus = read_corpus or self._read_text
        self._corpus: Corpus | None = None
        self._recomputes = config.recompute != "off"
        # with a stage of the volunteer's choice it stays there; the baseline DiLoCo has a fixed world
        moves = config.moves and config.stage < 0 and manifest.outer.averages_pairs
        has_text = bool(config.data) or manifest.data.source != "local" or read_corpus is not None
        fitting = stages_that_fit(manifest, psutil.virtual_memory().available, self._recomputes)
        self.serveable = {stage for stage in fitting if stage or has_text}  # of which a newcomer takes one
        self.may_serve = set(self.serveable) if moves else set[int]()

    def require(self, stage: int, freed: int = 0) -> None:
        """Raises `UserError` when the stage does not fit, `freed` bytes of memory being given back before."""
        available = psutil.virtual_memory().available + freed
        require_memory(self._manifest, stage, available, self._recomputes)
        if self._state is not None:
            require_disk(self._manifest, stage, self._state.path)
        if stage == 0:
            self.corpus()

    def check_move(self, source: int, target: int) -> None:
        """Raises `UserError` when `target` cannot be served instead of `source`: others are asked from then on."""
        try:
            self.require(target, freed=memory_of_state(self._manifest, source))
        except UserError:
            self.may_serve.discard(target)
            raise

    def corpus(self) -> Corpus:
        """The text of the first stage. Raises `DataError` with what to do."""
        if self._corpus is None:
            self._corpus = self._read_corpus(self._manifest, self._config.data)
        return self._corpus

    def _read_text(self, manifest: Manifest, data: Sequence[str]) -> Corpus:
        if not data and manifest.data.source == "local":
            raise DataError(
                f"Stage 0 of run '{manifest.name}' trains on text of your own: name it with --data FILE "
                "(globs may be used, and --data may be given several times), or serve another --stage."
            )
        corpus = load_corpus(data or manifest.data.source, manifest.data.held_out)
        corpus.require(manifest.data.sequence_tokens)
        return corpus
