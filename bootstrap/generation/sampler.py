"""The next token drawn from logits."""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from bootstrap.generation.decoding import Decoding


class Sampler:
    """Mutable state: the random generator. Draws what `generate` draws from the same logits and seed."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._generator = torch.Generator().manual_seed(decoding.seed)
        self._warpers = LogitsProcessorList()
        if not decoding.is_greedy:
            if decoding.temperature != 1:
                self._warpers.append(TemperatureLogitsWarper(decoding.temperature))
            if decoding.top_k:
                self._warpers.append(TopKLogitsWarper(decoding.top_k))
            if decoding.top_p < 1:
                self._warpers.append(TopPLogitsWarper(decoding.top_p))

    def choose(self, logits: torch.Tensor) -> int:
        """A token by logits [vocabulary]; −∞ are never chosen."""
        if self._decoding.is_greedy:
            return int(torch.argmax(logits))
        warped = self._warpers(torch.empty(1, 0, dtype=torch.long), logits[None])
        drawn = torch.multinomial(torch.softmax(warped, dim=-1), 1, generator=self._generator)
        return int(drawn)
