"""The disturbed run beside the undisturbed one: what was done, what it cost, what did not survive it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

Curve = Sequence[tuple[int, float]]  # tokens, nats

MOST_LOSS = 0.05  # nats between the two runs
LEAST_THROUGHPUT = 0.7  # of what is present


@dataclass(frozen=True)
class Run:
    """`tokens` trained in `seconds`, from the moment that all trained; `present` is the mean share of nodes there."""

    tokens: int = 0
    seconds: float = 0.0
    present: float = 1.0
    losses: Curve = ()

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class SeenFault:
    """A fault that began `seconds` after all were training and `lasted` seconds, and what was seen of it."""

    seconds: float
    kind: str
    node: str
    lasted: float
    answering: int = 0  # nodes, a moment after it
    warning: str = ""  # the last one in the node's log


def loss_at(curve: Curve, tokens: int) -> float | None:
    """Between the two measurements around it; None outside the curve."""
    for (before, first), (after, second) in pairwise(curve):
        if before <= tokens <= after:
            share = (tokens - before) / (after - before) if after > before else 1.0
            return first + share * (second - first)
    return None


@dataclass(frozen=True)
class ChaosReport:
    """`complete` is whether both runs had all their time."""

    seed: int
    complete: bool
    calm: Run
    disturbed: Run
    faults: Sequence[SeenFault] = ()
    ended: dict[str, str] = field(
        default_factory=dict
    )  # nodes that ended by themselves, with their last words
    restarted_parts: dict[str, int] = field(default_factory=dict)
    left_behind: Sequence[str] = ()

    @property
    def losses(self) -> tuple[int, float, float] | None:
        """Tokens, and both losses there: as many tokens as the run that trained on fewer."""
        if not (self.calm.losses and self.disturbed.losses):
            return None
        tokens = min(self.calm.losses[-1][0], self.disturbed.losses[-1][0])
        calm, disturbed = loss_at(self.calm.losses, tokens), loss_at(self.disturbed.losses, tokens)
        return None if calm is None or disturbed is None else (tokens, calm, disturbed)

    @property
    def throughput(self) -> float | None:
        """Of the disturbed run, as a share of what the undisturbed one's nodes that were present would do."""
        expected = self.calm.rate * self.disturbed.present
        return self.disturbed.rate / expected if expected else None

    def for_summary(self) -> dict[str, Any]:
        tokens, calm, disturbed = self.losses or (None, None, None)
        return asdict(self) | {
            "tokens": tokens,
            "undisturbed_loss": calm,
            "disturbed_loss": disturbed,
            "throughput": self.throughput,
        }

    def lines(self) -> list[str]:
        """The report for people."""
        lines = ["", f"faults of seed {self.seed}   at       what    whom  answering afterwards"]
        lines += [
            f"{'':20}{seen.seconds:5.0f} s   {seen.kind:7} {seen.node:7} {seen.answering}   {seen.warning}".rstrip()
            for seen in self.faults
        ]
        if self.losses is not None:
            tokens, calm, disturbed = self.losses
            lines.append(
                f"loss               {disturbed:.3f} disturbed, {calm:.3f} undisturbed at {tokens:,} tokens: "
                f"{disturbed - calm:+.3f} ({_verdict(disturbed - calm <= MOST_LOSS)} at most {MOST_LOSS:+})"
            )
        if self.throughput is not None:
            lines.append(
                f"throughput         {self.disturbed.rate:,.0f} tokens/s, undisturbed {self.calm.rate:,.0f}; "
                f"{self.disturbed.present:.0%} of the nodes present: {self.throughput:.2f} of what they would do "
                f"({_verdict(self.throughput >= LEAST_THROUGHPUT)} at least {LEAST_THROUGHPUT})"
            )
        lines += [f"ended by itself    {name}: {words}" for name, words in self.ended.items()]
        restarts = ", ".join(f"{part} {times}×" for part, times in self.restarted_parts.items())
        lines.append(f"parts restarted    {restarts or 'none'}")
        lines.append(f"nodes that ended   {len(self.ended) or 'none'}")
        lines.append(f"left behind        {', '.join(self.left_behind) or 'nothing'}")
        return lines


def _verdict(holds: bool) -> str:
    return "wanted:" if holds else "NOT reached, wanted:"
