"""One pipeline stage: a contiguous slice of a decoder, built from transformers' own modules.

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
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib import import_module
from inspect import signature
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from protocol.cut import head_work, layer_work
from protocol.manifest import Manifest
from protocol.model import Family, Model

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig


# with what the names of the family's classes begin
FAMILIES: dict[Family, str] = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


@dataclass(frozen=True)
class Parts:
    """What a stage is built from."""

    config: type[PreTrainedConfig]
    layer: Any
    norm: Any
    rotary: Any
    architecture: str

    @property
    def cache_keyword(self) -> str:
        """What a layer calls the keys and values of earlier tokens; transformers renamed it in 5.24."""
        return "cache" if "cache" in signature(self.layer.forward).parameters else "past_key_values"


@cache
def parts_of(family: Family) -> Parts:
    """transformers' classes. The first call imports them, a second or two that only those pay who build a stage."""
    name, package = FAMILIES[family], f"transformers.models.{family}"
    configuration = import_module(f"{package}.configuration_{family}")
    modeling = import_module(f"{package}.modeling_{family}")
    return Parts(
        getattr(configuration, f"{name}Config"),
        getattr(modeling, f"{name}DecoderLayer"),
        getattr(modeling, f"{name}RMSNorm"),
        getattr(modeling, f"{name}RotaryEmbedding"),
        f"{name}ForCausalLM",
    )


def model_config(manifest: Manifest) -> PreTrainedConfig:
    """The configuration of the whole model, as `config.json` of an export holds it."""
    model = manifest.model
    parts = parts_of(model.family)
    return parts.config(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.key_value_heads,
        max_position_embeddings=model.max_positions or manifest.data.sequence_tokens,
        rms_norm_eps=model.norm_eps,
        rope_parameters={"rope_type": model.rope.type, "rope_theta": model.rope_theta, **model.rope.given()},
        initializer_range=model.init_std,
        tie_word_embeddings=model.tied_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
        architectures=[parts.architecture],
        **_of_the_family(model),
    )


def _of_the_family(model: Model) -> dict[str, object]:
    """The settings that not all families know."""
    window = model.sliding_window or None
    if model.family == "llama":
        return {
            "attention_bias": model.attention_bias,
            "mlp_bias": model.mlp_bias,
            "head_dim": model.head_size,
        }
    if model.family == "mistral":
        return {"sliding_window": window, "head_dim": model.head_size}
    sliding: dict[str, object] = {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": model.full_layers,
    }
    if model.family == "qwen2":  # its configuration has no place for a head_dim, its layers ask for one
        return sliding | ({"head_dim": model.head_dim} if model.head_dim else {})
    return sliding | {"attention_bias": model.attention_bias, "head_dim": model.head_size}


RunLayer: TypeAlias = Callable[..., torch.Tensor]  # as `layer_outputs`


def layer_outputs(
    layer: nn.Module,
    hidden: torch.Tensor,
    mask: torch.Tensor | None,
    rotary: tuple[torch.Tensor, torch.Tensor],
    **kept: Cache,
) -> torch.Tensor:
    """One decoder layer; a function, so that the code compiled for one layer serves all."""
    outputs: torch.Tensor = layer(hidden, attention_mask=mask, position_embeddings=rotary, **kept)
    return outputs


class Stage(nn.Module):
    """The layers of one stage; the first stage embeds tokens, the last one, or in a ring the first, gives logits."""

    def __init__(self, manifest: Manifest, index: int, initialise: bool = True) -> None:
        super().__init__()
        config, parts = model_config(manifest), parts_of(manifest.model.family)
        self._model = manifest.model
        self.index = index
        self.is_first = index == 0
        self.is_last = index == manifest.stages - 1
        self.is_tied = manifest.model.tied_embeddings
        self.is_ring = manifest.is_ring
        self.recomputes = False  # keep the inputs of layers only, for the backward pass
        hidden, vocabulary = manifest.model.hidden_size, manifest.model.vocab_size
        if self.is_first:
            self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleDict(
            {str(layer): parts.layer(config, layer) for layer in manifest.layers_of(index)}
        )
        self._cache_keyword = parts.cache_keyword
        self.rotary = parts.rotary(config)
        if self.is_last:
            self.norm = parts.norm(hidden, eps=manifest.model.norm_eps)
            if not self.is_tied:
                self.lm_head = nn.Linear(hidden, vocabulary, bias=False)
        if initialise:
            self._initialise(manifest.model.seed, manifest.model.init_std)

    @property
    def head(self) -> torch.Tensor:
        """What logits are made with, [vocabulary, hidden]; the first stage's, in a ring."""
        module = self.embed_tokens if self.is_tied else self.lm_head
        assert isinstance(module.weight, torch.Tensor)
        return module.weight

    def forward(
        self,
        inputs: torch.Tensor,
        is_back: bool = False,
        cache: Cache | None = None,
        gives_logits: bool = True,
    ) -> torch.Tensor:
        """As `body`, with logits [sequences, tokens, vocabulary] at the end of the model if it `gives_logits`.

        In a ring the first stage makes them of what it gets from the last one, with `is_back`.
        """
        hidden = inputs if is_back else self.body(inputs, cache)
        is_end = is_back or (self.is_last and not self.is_ring)
        return F.linear(hidden, self.head) if is_end and gives_logits else hidden

    def body(
        self,
        inputs: torch.Tensor,
        cache: Cache | None = None,
        run_layer: RunLayer | None = None,
        layers: Iterable[str] | None = None,
    ) -> torch.Tensor:
        """Tokens [sequences, tokens] on the first stage, else activations [sequences, tokens, hidden].

        Returns activations, normed ones on the last stage. With the `cache` of what went before, one token of a
        sequence; its keys and values are added. `run_layer` stands for `layer_outputs`, `layers` for all of them.
        """
        hidden = self.embed_tokens(inputs) if self.is_first else inputs
        past = 0 if cache is None else cache.get_seq_length(int(next(iter(self.layers))))
        kept = {} if cache is None else {self._cache_keyword: cache}
        positions = torch.arange(past, past + hidden.shape[1], device=hidden.device).unsqueeze(0)
        rotary = self.rotary(hidden, position_ids=positions)
        run_layer = run_layer or layer_outputs
        for name in layers or self.layers:
            layer = self.layers[name]
            mask = self._mask(hidden) if self._model.slides(int(name)) else None
            run = partial(run_layer, layer, mask=mask, rotary=rotary, **kept)
            if self.recomputes and torch.is_grad_enabled():
                hidden = checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = run(hidden)
        return self.norm(hidden) if self.is_last else hidden

    def layers_of_each_kind(self) -> list[str]:
        """The first that sees all earlier tokens, the first that sees a window of them; a stage may lack either."""
        kinds = {self._model.slides(int(name)): name for name in [*self.layers][::-1]}
        return list(kinds.values())

    def _mask(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """What each token sees in the sliding window, [1, 1, tokens, tokens]; None where that is all before it."""
        tokens, window = hidden.shape[1], self._model.sliding_window
        if tokens <= window:
            return None
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=hidden.device)
        return seen.tril().triu(1 - window)[None, None]

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

    What memory and speed are told from asks for the same ones hundreds of times.
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
    """For people: a model is often called by its blocks alone."""
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
