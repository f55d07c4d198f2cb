"""Replicas that are broken, not malicious: their numbers are NaN, infinite or absurd, at one place, all the time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch

from node.model.inner import StepReport
from node.model.replica import Replica
from protocol.run.manifest import Manifest

Place = Literal["activations", "gradients", "loss", "weights", "norms"]


class BrokenReplica(Replica):
    """As any other, but `value` is what comes out at one place. Mutable state: whether it is broken now."""

    def __init__(self, manifest: Manifest, stage: int, device: str, place: Place, value: float) -> None:
        super().__init__(manifest, stage, device)
        self.is_broken = True
        self._place = place
        self._value = value
        passes = self.passes
        self._wrap(passes, "forward", "activations", self._spoil_second)
        self._wrap(passes, "backward", "gradients", self._spoil)
        self._wrap(passes, "last_stage", "gradients", self._spoil_second)
        self._wrap(passes, "last_stage", "loss", self._spoil_first)

    def inner_step(self, batch: int) -> StepReport:
        if self.is_broken and self._place == "norms":
            self.flat.gradients.fill_(self._value)
        report = super().inner_step(batch)
        if self.is_broken and self._place == "weights":
            with torch.no_grad():
                self.flat.values[::3] = self._value
        return report

    def _wrap(self, passes: Any, name: str, place: Place, spoil: Callable[[Any], Any]) -> None:
        original = getattr(passes, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            return spoil(result) if self.is_broken and self._place == place else result

        wrapped.__name__ = name
        setattr(passes, name, wrapped)

    def _spoil(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        with torch.no_grad():
            spoilt = tensor.detach().clone()
            spoilt.view(-1)[::5] = self._value
        return spoilt if tensor.grad_fn is None else tensor + (spoilt - tensor.detach())

    def _spoil_first(self, pair: tuple[torch.Tensor, Any]) -> tuple[Any, Any]:
        return self._spoil(pair[0].reshape(1)).reshape(()), pair[1]  # type: ignore[union-attr]

    def _spoil_second(self, pair: tuple[Any, torch.Tensor]) -> tuple[Any, Any]:
        return pair[0], self._spoil(pair[1])


def broken(place: Place, value: float = math.nan) -> Callable[[Manifest, int, str], Replica]:
    """What `SimulatedSwarm.add` makes a node's replica with."""
    return lambda manifest, stage, device: BrokenReplica(manifest, stage, device, place, value)
