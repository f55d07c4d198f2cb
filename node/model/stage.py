"""One pipeline stage: a contiguous slice of a Llama, built from transformers' own modules.

Parameters carry the names that `LlamaForCausalLM` gives them, so that the stages' weights put together are a
checkpoint, and each is initialised from (seed, name) alone, so that every peer computes the same weights
whatever the cut.
"""

from __future__ import annotations

import hashlib
import math
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from protocol.manifest import Manifest


def llama_config(manifest: Manifest) -> LlamaConfig:
    """The configuration of the whole model, as `config.json` of an export holds it."""
    model = manifest.model
    return LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.key_value_heads,
        max_position_embeddings=manifest.data.sequence_tokens,
        rms_norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        initializer_range=model.init_std,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )


class Stage(nn.Module):
    """The layers of one stage; the first stage embeds tokens, the last one ends in logits."""

    def __init__(self, manifest: Manifest, index: int, initialise: bool = True) -> None:
        super().__init__()
        config = llama_config(manifest)
        self.index = index
        self.is_first = index == 0
        self.is_last = index == manifest.stages - 1
        self.recomputes = False  # keep the inputs of layers only, for the backward pass
        if self.is_first:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict(
            {str(layer): LlamaDecoderLayer(config, layer) for layer in manifest.layers_of(index)}
        )
        self.rotary = LlamaRotaryEmbedding(config)
        if self.is_last:
            self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if initialise:
            self._initialise(manifest.model.seed, manifest.model.init_std)

    def forward(self, inputs: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """Tokens [sequences, tokens] on the first stage, else activations [sequences, tokens, hidden].

        Returns activations, on the last stage logits [sequences, tokens, vocabulary]. With the `cache` of what went
        before, one token of a sequence; its keys and values are added.
        """
        hidden = self.embed_tokens(inputs) if self.is_first else inputs
        past = 0 if cache is None else cache.get_seq_length(int(next(iter(self.layers))))
        positions = torch.arange(past, past + hidden.shape[1], device=hidden.device).unsqueeze(0)
        rotary = self.rotary(hidden, position_ids=positions)
        for layer in self.layers.values():
            run = partial(layer, attention_mask=None, position_embeddings=rotary, past_key_values=cache)
            if self.recomputes and torch.is_grad_enabled():
                hidden = checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = run(hidden)
        return self.lm_head(self.norm(hidden)) if self.is_last else hidden

    def checkpoint_name(self, name: str) -> str:
        """The name that `LlamaForCausalLM` gives to the parameter `name` of this module."""
        return name if name.startswith("lm_head.") else f"model.{name}"

    @torch.no_grad()
    def _initialise(self, seed: int, std: float) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:  # the norms' gains
                parameter.fill_(1.0)
                continue
            digest = hashlib.sha256(f"{seed}:{self.checkpoint_name(name)}".encode()).digest()
            # numpy's Philox gives the same numbers on every processor; torch's kernels differ between them
            generator = np.random.Generator(np.random.Philox(int.from_bytes(digest[:16], "big")))
            drawn = generator.standard_normal(parameter.numel()) * std
            parameter.copy_(torch.from_numpy(drawn).view(parameter.shape))


def parameter_shapes(manifest: Manifest, index: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a stage's parameters, in order, without taking memory for them."""
    with torch.device("meta"):
        stage = Stage(manifest, index, initialise=False)
    return {stage.checkpoint_name(name): tuple(p.shape) for name, p in stage.named_parameters()}


def work_of(manifest: Manifest, index: int) -> int:
    """Multiplications that a token costs at the stage, forward: what stages are compared by."""
    model, layers = manifest.model, len(manifest.layers_of(index))
    table = model.vocab_size * model.hidden_size  # looked up at the first stage, multiplied with at the last
    weights = parameter_count(manifest, index) - (table if index == 0 else 0)
    return (
        weights + layers * 2 * manifest.data.sequence_tokens * model.hidden_size
    )  # scores, and values by them


def parameter_count(manifest: Manifest, index: int) -> int:
    return sum(math.prod(shape) for shape in parameter_shapes(manifest, index).values())
