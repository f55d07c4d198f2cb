"""Which stages this machine can serve: memory, disk, and text for the first one."""

from __future__ import annotations

import torch

from node.config import NodeConfig
from node.data.opening import LOCAL
from node.machine.limits import Room, host_room
from node.membership.data_source import DataSupply
from node.model.memory_model import memory_of_state
from node.model.resources import (
    require_disk,
    require_host_memory,
    require_memory,
    room_on,
    stages_that_fit,
)
from node.model.state_directory import StateDirectory
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
        self._config = config
        self._manifest = manifest
        self._state = state
        self._data = data
        self._device = torch.device(config.device)
        self._on_host = self._device.type == "cpu"
        # with a stage of the volunteer's choice it stays there; the baseline DiLoCo has a fixed world
        moves = config.moves and config.stage < 0 and manifest.outer.averages_pairs
        has_text = bool(config.data) or manifest.data.source != LOCAL
        fitting = stages_that_fit(manifest, self._room(), config.recompute, self._on_host)
        self.serveable = {stage for stage in fitting if stage or has_text}  # of which a newcomer takes one
        self.may_serve = set(self.serveable) if moves else set[int]()

    def _room(self, freed: int = 0) -> Room:
        room = room_on(self._device, self._config.most_memory)
        return Room(room.free + freed, room.limit, room.source)

    def require(self, stage: int, freed: int = 0) -> None:
        """Raises `UserError` when the stage does not fit, `freed` bytes of memory being given back before."""
        require_memory(self._manifest, stage, self._room(freed), self._config.recompute, self._on_host)
        if not self._on_host:
            require_host_memory(self._manifest, stage, host_room())
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
