"""A loop in plain PyTorch that is as fast as it can be made, with no regard for a swarm: what ours is compared with.

Compiled whole, weights and gradients in bf16 as one tensor each with float32 masters, one fused AdamW, the loss over
chunks of tokens with a padded vocabulary, attention by SDPA. On a processor everything is float32 and not compiled.
"""

from __future__ import annotations

import time

import torch

from bootstrap.lab.simulation.learning import text_of
from node.machine.accelerator import has_bf16
from node.model.flat import FlatParameters
from node.model.head_loss import loss_with_gradients, padded, plain_softmax
from node.model.inner import learning_rate
from node.model.stage import Stage
from node.storage.position import Position
from protocol.run.manifest import Manifest


class Tuned:
    """One stage, or with a manifest of one stage the whole model. Mutable state: its weights and gradients."""

    def __init__(self, manifest: Manifest, index: int, device: torch.device, compiles: bool) -> None:
        self.manifest, self._device = manifest, device
        self.stage = Stage(manifest, index).to(device)
        self._flat = FlatParameters(list(self.stage.named_parameters()))
        self._has_head = index == manifest.head_stage
        self._working = self._gradients = self._head = None
        if has_bf16(device):
            self._halve()
        self._head_gradient = self._place_of_head() if self._has_head else None
        self._body = torch.compile(self.stage.body, dynamic=False) if compiles else self.stage.body
        self._softmax = torch.compile(plain_softmax, dynamic=False) if compiles else plain_softmax
        self._optimizers = self._fused()

    def _halve(self) -> None:
        """Compute with bf16 copies of the weights, whose gradients are bf16, too."""
        self._working = self._flat.values.to(torch.bfloat16)
        self._gradients = torch.zeros_like(self._working)
        parameters = dict(self.stage.named_parameters())
        for place in self._flat.slices:
            parameter = parameters[place.name]
            parameter.grad = None
            parameter.data = place.of(self._working)
            parameter.grad = place.of(self._gradients)
        if self._has_head:
            rows, hidden = self.stage.head.shape
            self._head = torch.zeros(padded(rows), hidden, dtype=torch.bfloat16, device=self._device)
            self._head[:rows].copy_(self.stage.head)

    def _place_of_head(self) -> torch.Tensor:
        name = next(name for name, p in self.stage.named_parameters() if p is self.stage.head)
        return next(place for place in self._flat.slices if place.name == name).of(self._flat.gradients)

    def _fused(self) -> list[torch.optim.AdamW]:
        inner = self.manifest.inner
        return [
            torch.optim.AdamW(
                [self._parameter(place)],
                lr=inner.learning_rate,
                betas=(inner.beta1, inner.beta2),
                eps=inner.eps,
                weight_decay=inner.weight_decay if place.start < self._flat.decayed else 0.0,
                fused=True,
            )
            for place in self._flat.groups(left_out=slice(0, 0))
        ]

    def _parameter(self, place: slice) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(self._flat.values[place])
        parameter.grad = self._flat.gradients[place]
        return parameter

    def microbatch(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Forward and backward; where the model ends with the loss, elsewhere with a gradient of ones."""
        leaf = inputs if self.stage.is_first else inputs.to(self._flat_type).requires_grad_()
        outputs = self._body(leaf)
        if not self._has_head:
            outputs.backward(torch.ones_like(outputs))
            return outputs
        weight = self.stage.head if self._head is None else self._head
        rows = len(self.stage.head)
        hidden = outputs.detach().flatten(0, 1)
        found = loss_with_gradients(hidden, weight, labels.flatten(), rows, softmax=self._softmax)
        self._head_gradient.add_(found.by_weight)
        outputs.backward(found.by_hidden.view_as(outputs))
        return found.loss

    @property
    def _flat_type(self) -> torch.dtype:
        return torch.float32 if self._working is None else torch.bfloat16

    @torch.no_grad()
    def step(self, microbatches: int, step: int) -> None:
        gradients, inner = self._flat.gradients, self.manifest.inner
        if self._gradients is not None:
            gradients.add_(self._gradients)
            self._gradients.zero_()
        norm = torch.linalg.vector_norm(gradients) / microbatches
        gradients.mul_((inner.clip_norm / norm).clamp(max=1.0) / microbatches)
        for optimizer in self._optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate(inner, step)
            optimizer.step()
        gradients.zero_()
        if self._working is not None:
            self._working.copy_(self._flat.values)
            if self._head is not None:
                self._head[: len(self.stage.head)].copy_(self.stage.head)


def train_tuned(manifest: Manifest, device: torch.device, seconds: float, compiles: bool) -> float:
    """Tokens per second of the whole model over about `seconds`, two inner steps at least after one to warm up."""
    assert manifest.stages == 1
    loop, inner, data = Tuned(manifest, 0, device, compiles), manifest.inner, text_of(manifest)
    line = data.batches("bench", "tuned", manifest, Position(data.identity))
    began, steps = 0.0, -1
    while steps < 2 or time.perf_counter() - began < seconds:
        if steps == 0:
            began = time.perf_counter()
        for _ in range(inner.microbatches):
            inputs, labels = (tensor.to(device, non_blocking=True) for tensor in next(line)[0])
            loss = loop.microbatch(inputs, labels)
        loop.step(inner.microbatches, max(0, steps))
        loss.item()  # waits for the device
        steps += 1
    return steps * inner.microbatches * manifest.tokens_per_microbatch / (time.perf_counter() - began)
