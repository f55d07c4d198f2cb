"""One pipeline stage: a contiguous slice of a decoder.

Parameters carry the names that `LlamaForCausalLM` and its like give them, so that the stages' weights put together
are a checkpoint, and each is initialised from (seed, name) alone, so that every peer computes the same weights
whatever the cut.

Tied embeddings are one matrix in the first stage. In several stages the last one's outputs therefore come back to
the first stage, which multiplies them with it: microbatches go around a ring.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from node.model.decoder import Embedding, KeyValues, Layer, Linear, Norm, Rotary, Waves, visible
from protocol.run.cut import head_work, layer_work
from protocol.run.manifest import Manifest

RunLayer: TypeAlias = Callable[..., torch.Tensor]  # as `layer_outputs`


def layer_outputs(
    layer: nn.Module,
    hidden: torch.Tensor,
    waves: Waves,
    mask: torch.Tensor | None,
    cache: KeyValues | None,
) -> torch.Tensor:
    """The outputs of one decoder layer; a function, so that the code compiled for one layer serves all."""
    outputs: torch.Tensor = layer(hidden, waves, mask, cache)
    return outputs


class Stage(nn.Module):
    """The layers of one stage; the first stage embeds tokens, the last one, or in a ring the first, gives logits."""

    def __init__(self, manifest: Manifest, index: int, initialise: bool = True) -> None:
        super().__init__()
        model = self._model = manifest.model
        self.index = index
        self.is_first = index == 0
        self.is_last = index == manifest.stages - 1
        self.is_tied = model.tied_embeddings
        self.is_ring = manifest.is_ring
        self.recomputes = False  # keep the inputs of layers only, for the backward pass
        hidden, vocabulary = model.hidden_size, model.vocab_size
        if self.is_first:
            self.embed_tokens = Embedding(vocabulary, hidden)
        self.layers = nn.ModuleDict({str(layer): Layer(model, layer) for layer in manifest.layers_of(index)})
        self.rotary = Rotary(model, manifest.positions)
        if self.is_last:
            self.norm = Norm(hidden, model.norm_eps)
            if not self.is_tied:
                self.lm_head = Linear(hidden, vocabulary, bias=False)
        if initialise:
            self._initialise(model.seed, model.init_std)

    @property
    def head(self) -> torch.Tensor:
        """The matrix that logits are made with, [vocabulary, hidden]; the first stage's, in a ring."""
        module = self.embed_tokens if self.is_tied else self.lm_head
        assert isinstance(module.weight, torch.Tensor)
        return module.weight

    def forward(
        self,
        inputs: torch.Tensor,
        is_back: bool = False,
        cache: KeyValues | None = None,
        gives_logits: bool = True,
    ) -> torch.Tensor:
        """Run `body`, and at the end of the model make logits [sequences, tokens, vocabulary] if it `gives_logits`.

        In a ring the first stage makes them of what it gets from the last one, with `is_back`.
        """
        hidden = inputs if is_back else self.body(inputs, cache)
        is_end = is_back or (self.is_last and not self.is_ring)
        return F.linear(hidden, self.head) if is_end and gives_logits else hidden

    def body(
        self,
        inputs: torch.Tensor,
        cache: KeyValues | None = None,
        run_layer: RunLayer | None = None,
        layers: Iterable[str] | None = None,
    ) -> torch.Tensor:
        """Tokens [sequences, tokens] on the first stage, else activations [sequences, tokens, hidden].

        Returns activations, normed ones on the last stage. They go on after what the `cache` holds, to which their
        keys and values are added. `run_layer` stands for `layer_outputs`, `layers` for all of them.
        """
        hidden = self.embed_tokens(inputs) if self.is_first else inputs
        past = 0 if cache is None else cache.tokens
        waves = self.rotary(hidden, past)
        window, tokens = self._model.sliding_window, hidden.shape[1]
        masks = {slides: visible(tokens, past, window * slides, hidden.device) for slides in (False, True)}
        run_layer = run_layer or layer_outputs
        for name in layers or self.layers:
            mask = masks[self._model.slides(int(name))]
            run = partial(run_layer, self.layers[name], waves=waves, mask=mask, cache=cache)
            if self.recomputes and torch.is_grad_enabled():
                hidden = checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = run(hidden)
        return self.norm(hidden) if self.is_last else hidden

    def layers_of_each_kind(self) -> list[str]:
        """The first layer that sees all earlier tokens, the first that sees a window; a stage may lack either."""
        kinds = {self._model.slides(int(name)): name for name in [*self.layers][::-1]}
        return list(kinds.values())

    def checkpoint_name(self, name: str) -> str:
        """The name that `LlamaForCausalLM` gives to the parameter `name` of this module."""
        return name if name.startswith("lm_head.") else f"model.{name}"

    @torch.no_grad()
    def _initialise(self, seed: int, std: float) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:  # the norms' gains, and biases
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
                continue
            digest = hashlib.sha256(f"{seed}:{self.checkpoint_name(name)}".encode()).digest()
            # numpy's Philox gives the same numbers on every processor; torch's kernels differ between them
            generator = np.random.Generator(np.random.Philox(int.from_bytes(digest[:16], "big")))
            drawn = generator.standard_normal(parameter.numel()) * std
            parameter.copy_(torch.from_numpy(drawn).view(parameter.shape))


def logits_through(stages: Iterable[Stage], tokens: torch.Tensor) -> torch.Tensor:
    """The whole model's logits [sequences, tokens, vocabulary] by all of its stages, one after another."""
    parts = list(stages)
    hidden = tokens
    for stage in parts:
        hidden = stage(hidden)
    return parts[0](hidden, is_back=True) if parts[0].is_ring else hidden


@lru_cache(512)
def parameter_shapes(manifest: Manifest, index: int) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of a stage's parameters, in order, without taking memory for them.

    They are kept: memory and speed are told from the same ones hundreds of times.
    """
    with torch.device("meta"):
        stage = Stage(manifest, index, initialise=False)
    return MappingProxyType(
        {stage.checkpoint_name(name): tuple(p.shape) for name, p in stage.named_parameters()}
    )


def work_of(manifest: Manifest, index: int) -> int:
    """Multiplications that a token costs at the stage, forward: what stages are compared by."""
    model = manifest.model
    work = len(manifest.layers_of(index)) * layer_work(model, manifest.data.sequence_tokens)
    return work + (head_work(model) if index == manifest.head_stage else 0)


def parameter_count(manifest: Manifest, index: int) -> int:
    return sum(math.prod(shape) for shape in parameter_shapes(manifest, index).values())


def described_parameters(manifest: Manifest) -> str:
    """Describe the number of parameters for people: a model is often called by its blocks alone."""
    total = sum(parameter_count(manifest, stage) for stage in range(manifest.stages))
    model = manifest.model
    vocabulary = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    return (
        f"{_rounded(total)} parameters ({_rounded(total - vocabulary)} in its blocks, {_rounded(vocabulary)} for its "
        f"vocabulary of {model.vocab_size:,})"
    )


def _rounded(number: int) -> str:
    return (
        f"{number / 1e9:.2f}B"
        if number >= 1e9
        else f"{number / 1e6:.1f}M"
        if number >= 1e6
        else f"{number:,}"
    )
