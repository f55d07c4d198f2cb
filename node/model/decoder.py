"""A decoder's layers in plain torch: Llama's, and by the manifest's settings Mistral's, Qwen2's and Qwen3's.

Parameters have the names, shapes and order of transformers' modules, and the layers compute what those compute:
RMSNorm (Zhang and Sennrich 2019), rotary positions (Su et al. 2021) with their stretches, attention with grouped
queries (Ainslie et al. 2023), SwiGLU (Shazeer 2020).

In the shapes S are sequences, T tokens of each, P tokens that went before, H the model's width, N heads of D values.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from protocol.run.model import Model

Waves = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of each position, [T, D / 2] each


class KeyValues:
    """The keys and values that attention keeps of one answer in the making, by layer; they grow with each token."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def tokens(self) -> int:
        """The number of tokens that went through all layers."""
        return next((keys.shape[2] for keys, _ in self._kept.values()), 0)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for pair in self._kept.values() for tensor in pair)

    def extended(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of all tokens, [S, heads, P + T, D], which are kept in place of the earlier ones."""
        if layer in self._kept:
            before = self._kept[layer]
            keys, values = torch.cat((before[0], keys), dim=2), torch.cat((before[1], values), dim=2)
        self._kept[layer] = keys, values
        return keys, values


class Linear(nn.Linear):
    """torch's `Linear` with weights of any value: whoever makes a stage draws or loads them."""

    def reset_parameters(self) -> None:
        """Draw nothing."""


class Embedding(nn.Embedding):
    """torch's `Embedding` with weights of any value, as `Linear`."""

    def reset_parameters(self) -> None:
        """Draw nothing."""


class Norm(nn.Module):
    """RMSNorm over the last dimension, with a gain for each of its `size` values."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight.to(hidden.dtype), self._eps)


class Attention(nn.Module):
    """Attention: each token asks those before it, within the sliding window where there is one."""

    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        hidden, size = model.hidden_size, model.head_size
        queries, keys = model.heads * size, model.key_value_heads * size
        self.q_proj = Linear(hidden, queries, bias=model.has_query_biases)
        self.k_proj = Linear(hidden, keys, bias=model.has_query_biases)
        self.v_proj = Linear(hidden, keys, bias=model.has_query_biases)
        self.o_proj = Linear(queries, hidden, bias=model.attention_bias)
        self.q_norm = Norm(size, model.norm_eps) if model.has_query_norms else None
        self.k_norm = Norm(size, model.norm_eps) if model.has_query_norms else None
        self._size = size
        self._is_grouped = model.key_value_heads < model.heads
        self._layer = layer

    def forward(
        self, hidden: torch.Tensor, waves: Waves, mask: torch.Tensor | None, cache: KeyValues | None
    ) -> torch.Tensor:
        sequences, tokens, _ = hidden.shape
        by_head = (sequences, tokens, -1, self._size)
        queries = self.q_proj(hidden).view(by_head)
        keys = self.k_proj(hidden).view(by_head)
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries = turned(queries.transpose(1, 2), waves)  # [S, N, T, D]
        keys = turned(keys.transpose(1, 2), waves)  # [S, heads of keys, T, D]
        values = self.v_proj(hidden).view(by_head).transpose(1, 2)
        if cache is not None:
            keys, values = cache.extended(self._layer, keys, values)
        answers = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None and tokens > 1,
            enable_gqa=self._is_grouped,
        )
        mixed: torch.Tensor = self.o_proj(answers.transpose(1, 2).reshape(sequences, tokens, -1))
        return mixed


class GatedMlp(nn.Module):
    """The feed-forward block, SwiGLU."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        hidden, inner, bias = model.hidden_size, model.intermediate_size, model.mlp_bias
        self.gate_proj = Linear(hidden, inner, bias=bias)
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return outputs


class Layer(nn.Module):
    """One decoder layer, whose norms stand before what they are for."""

    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(model, layer)
        self.mlp = GatedMlp(model)
        self.input_layernorm = Norm(model.hidden_size, model.norm_eps)
        self.post_attention_layernorm = Norm(model.hidden_size, model.norm_eps)

    def forward(
        self,
        hidden: torch.Tensor,
        waves: Waves,
        mask: torch.Tensor | None = None,
        cache: KeyValues | None = None,
    ) -> torch.Tensor:
        """Activations [S, T, H] of the next layer. `mask` is what `visible` gave, `cache` of what went before."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), waves, mask, cache)
        outputs: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return outputs


def visible(tokens: int, past: int, window: int, device: torch.device) -> torch.Tensor | None:
    """The mask of what `tokens` see of themselves and of `past` earlier ones, [T, P + T].

    With a `window` other than 0 each sees so many at most. None where each sees all before it, and attention needs
    no mask.
    """
    seen = past + tokens
    if (not window or seen <= window) and (not past or tokens == 1):
        return None
    before = torch.ones(tokens, seen, dtype=torch.bool, device=device).tril(past)
    return before.triu(past + 1 - window) if window else before


# --- positions ------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """The waves by which positions turn queries and keys."""

    def __init__(self, model: Model, longest: int) -> None:
        """`longest` are the positions that the model was made for."""
        super().__init__()
        self._model, self._longest = model, longest
        self._scale = _scale_of(model)
        self.register_buffer("_frequencies", frequencies(model, longest), persistent=False)

    def forward(self, hidden: torch.Tensor, past: int) -> Waves:
        """The waves of `hidden` [S, T, …], which begins after `past` tokens, in its type."""
        seen = past + hidden.shape[1]
        turns = self._frequencies
        if self._model.rope.type == "dynamic" and seen > self._longest:
            turns = frequencies(self._model, self._longest, seen)
        assert isinstance(turns, torch.Tensor)
        positions = torch.arange(past, seen, device=hidden.device, dtype=torch.float32)
        angles = torch.outer(positions, turns.to(hidden.device, torch.float32))
        cosines, sines = angles.cos() * self._scale, angles.sin() * self._scale
        return cosines.to(hidden.dtype), sines.to(hidden.dtype)


def turned(heads: torch.Tensor, waves: Waves) -> torch.Tensor:
    """Queries or keys [S, N, T, D] turned by their positions: the two halves of D are the parts of each pair."""
    cosines, sines = waves
    left, right = heads.chunk(2, dim=-1)
    return torch.cat((left * cosines - right * sines, right * cosines + left * sines), dim=-1)


def frequencies(model: Model, longest: int, tokens: int = 0) -> torch.Tensor:
    """Angle by which one position turns each pair of values, float32 [D / 2]; of `tokens` where they are dynamic."""
    rope, size = model.rope, model.head_size
    theta, factor = model.rope_theta, rope.factor or 1.0
    if rope.type == "dynamic" and size > 2:  # NTK: the base grows with the length
        theta *= (factor * max(tokens, longest) / longest - (factor - 1)) ** (size / (size - 2))
    pairs = torch.arange(0, size, 2, dtype=torch.float32, device="cpu")  # also of a stage that has no device
    plain: torch.Tensor = 1.0 / theta ** (pairs / size)
    match rope.type:
        case "linear":
            return plain / factor
        case "llama3":
            return _between_wavelengths(model, plain)
        case "yarn":
            return _between_pairs(model, plain)
        case _:
            return plain


def _between_wavelengths(model: Model, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1's stretching: long waves by the factor, short ones not at all, those between them in part."""
    known = model.rope.given()
    low, high = known["low_freq_factor"], known["high_freq_factor"]
    waves = known["original_max_position_embeddings"] * plain / (2 * math.pi)  # in the positions of before
    share = ((waves - low) / (high - low)).clamp(0, 1)
    return (1 - share) * plain / known["factor"] + share * plain


def _between_pairs(model: Model, plain: torch.Tensor) -> torch.Tensor:
    """YaRN's ramp over the pairs (Peng et al. 2023), from those left as they are to those that are stretched."""
    known, size = model.rope.given(), model.head_size

    def place(turns: float) -> float:
        """Place of the pair that turns so often in the original positions."""
        length = known["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return size * math.log(length) / (2 * math.log(model.rope_theta))

    low, high = place(known.get("beta_fast", 32.0)), place(known.get("beta_slow", 1.0))
    if known.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(size // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    return plain / known["factor"] * ramp + plain * (1 - ramp)


def _scale_of(model: Model) -> float:
    """The factor by which YaRN multiplies the waves, and so all scores of attention by its square."""
    rope = model.rope
    if rope.type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(by: float) -> float:
        return 0.1 * by * math.log(rope.factor) + 1.0 if rope.factor and rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
