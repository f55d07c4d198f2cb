"""A few sequences that the stage has trained on lately, to try on them what other weights would do to the loss.

Where the model ends it is the loss itself. Before, it is what the loss would be by the gradient that the next stage
gave: ⟨g, f(x; w)⟩ differs from weights to weights as the loss does, to first order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F

from protocol.windows import counted, window

Kept = tuple[torch.Tensor, torch.Tensor]  # inputs, and labels or gradients

KEPT = 8  # sequences, of different microbatches
TOKENS = 256  # of a sequence, from its beginning, at most: what comes later does not change what they give
MOST_VALUES = 2**22  # outputs at once: 16 MB in float32; a small model's sequences are all tried in one pass


class Probes:
    """Keeps the last sequences, and tries weights on them.

    Mutable state: these sequences, and how many tokens go through the stage together. One thread uses it.
    """

    def __init__(self) -> None:
        self._kept: deque[Kept] = deque(maxlen=KEPT)
        self._at_once = 1  # tokens; none but a sequence by itself until it is known how wide outputs are

    @window
    def __repr__(self) -> str:
        return f"Kept: {counted(len(self._kept), 'sequence')}"

    def clear(self) -> None:
        """Keep none of the sequences so far."""
        self._kept.clear()

    @torch.no_grad()
    def keep(self, inputs: torch.Tensor, target: torch.Tensor) -> None:
        """Keep the first sequence of a microbatch, or what of it is within `TOKENS`.

        `target` is its labels, int64 [sequences, tokens], or the gradient of its mean loss by the stage's outputs,
        [sequences, tokens, hidden].
        """
        scale = 1 if target.dtype == torch.int64 else len(target) * target.shape[1]
        self._kept.append(
            (inputs[:1, :TOKENS].detach().clone(), target[:1, :TOKENS].detach().clone() * scale)
        )

    @torch.no_grad()
    def losses(self, run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
        """The loss of each token in nats, [tokens], where `run` gives the stage's outputs under weights in question.

        Before the last stage but for a constant, which is the same for all weights, and only to first order. None
        when nothing is kept.
        """
        if not self._kept:
            return None
        losses = []
        for group in _alike(self._kept, self._at_once):
            inputs, targets = (torch.cat(values) for values in zip(*group, strict=True))
            outputs = run(inputs)
            losses.append(_losses(outputs, targets))
            self._at_once = MOST_VALUES // outputs.shape[-1]
        return torch.cat(losses)


def _alike(sequences: Iterable[Kept], at_once: int) -> Iterator[list[Kept]]:
    """Groups of sequences of one length that follow each other, of up to `at_once` tokens or one sequence."""
    group: list[Kept] = []
    for inputs, target in sequences:
        is_full = (len(group) + 1) * inputs.shape[1] > at_once
        if group and (is_full or inputs.shape != group[0][0].shape):
            yield group
            group = []
        group.append((inputs, target))
    if group:
        yield group


def _losses(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    outputs, target = outputs.flatten(0, 1).float(), target.to(outputs.device).flatten(0, 1)
    if target.dtype == torch.int64:
        return F.cross_entropy(outputs, target, reduction="none")
    return (outputs * target.float()).sum(-1)
