"""Which stages this machine can serve: memory, disk, and text for the first one."""

from __future__ import annotations

import psutil

from node.config import NodeConfig
from node.data.opening import LOCAL
from node.data.supply import DataSupply
from node.machine.resources import memory_of_state, require_disk, require_memory, stages_that_fit
from node.state.directory import StateDirectory
from protocol.errors import UserError
from protocol.manifest import Manifest


class Abilities:
    """Mutable state: the stages that this node would move to."""

    def __init__(
        self,
        config: NodeConfig,
        manifest: Manifest,
        state: StateDirectory | None,
        data: DataSupply,
    ) -> None:
        self._manifest = manifest
        self._state = state
        self._data = data
        self._recomputes = config.recompute != "off"
        # with a stage of the volunteer's choice it stays there; the baseline DiLoCo has a fixed world
        moves = config.moves and config.stage < 0 and manifest.outer.averages_pairs
        has_text = bool(config.data) or manifest.data.source != LOCAL
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
            self._data.require()

    def check_move(self, source: int, target: int) -> None:
        """Raises `UserError` when `target` cannot be served instead of `source`: others are asked from then on."""
        try:
            self.require(target, freed=memory_of_state(self._manifest, source))
        except UserError:
            self.may_serve.discard(target)
            raise
