"""The position of a volunteer in its data, as it is kept with a checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Position:
    """A volunteer's position in its corpus; a few numbers that are kept with the checkpoint.

    The window of sequences that is drawn from begins at token `token` of the `document`-th document of epoch `epoch`,
    in the order in which this volunteer trains on them; `drawn` of its sequences were trained on. `corpus` is the
    identity of what was counted.
    """

    corpus: str
    epoch: int = 0
    document: int = 0
    token: int = 0
    drawn: int = 0

    def facts(self) -> dict[str, str | int]:
        return asdict(self)

    @classmethod
    def of(cls, facts: object) -> Position | None:
        """Read from what was saved; None when that is unusable. Earlier versions drew in order and say no `drawn`."""
        if not isinstance(facts, dict):
            return None
        facts = {"drawn": 0} | facts
        corpus, numbers = (
            facts.get("corpus"),
            [facts.get(name) for name in ("epoch", "document", "token", "drawn")],
        )
        counts = [number for number in numbers if isinstance(number, int) and 0 <= number < 2**63]
        return cls(corpus, *counts) if isinstance(corpus, str) and len(counts) == len(numbers) else None
