"""The choice of the next token, for an export and a swarm alike."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import UserError


@dataclass(frozen=True)
class Decoding:
    """The settings of the choice. Temperature 0 is greedy: the likeliest token. `top_k` 0, `top_p` 1 leave all in."""

    most_tokens: int = 100
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for wrong, told in (
            (self.most_tokens < 1, "--tokens must be 1 or more."),
            (not 0 <= self.temperature < float("inf"), "--temperature must be 0 (greedy) or more."),
            (self.top_k < 0, "--top-k must be 0 (all tokens) or more."),
            (not 0 < self.top_p <= 1, "--top-p must lie above 0, and at 1 (all tokens) at most."),
            (
                not self.temperature and (self.top_k or self.top_p < 1),
                "--top-k and --top-p choose among tokens: give a --temperature above 0 with them, 0.8 for instance.",
            ),
        ):
            if wrong:
                raise UserError(told)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def needed(self) -> int:
        """The number of largest logits needed to choose a token; 0 means all."""
        return 1 if self.is_greedy else self.top_k

    def for_transformers(self) -> dict[str, float]:
        """These settings as keyword arguments of transformers' `generate`."""
        if self.is_greedy:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
