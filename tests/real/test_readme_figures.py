"""What the README shows of `make swarm` is what the command prints today."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.patience import patience
from tests.real.test_local_swarm import said, start

README = Path(__file__).parents[2] / "README.md"
FIGURES = (
    r"validation loss +start (?P<start>[\d.]+) +end (?P<end>[\d.]+) nats per byte"
    r"\s+same text +unigram (?P<unigram>[\d.]+) +bigram (?P<bigram>[\d.]+)"
    r"[^\n]*\s+trained +(?P<tokens>[\d,]+) tokens"
)
APART = 0.05  # of the README's figure
JUMP = 0.15  # nats, between the losses shown one after another in the second half
RISE = 0.05  # nats, of one loss on held-out text above the one before: how far apart they are is the machine's choice


def figures(text: str) -> dict[str, float]:
    found = re.search(FIGURES, text)
    assert found is not None, text
    return {name: float(value.replace(",", "")) for name, value in found.groupdict().items()}


@pytest.mark.timeout(patience(900))
def test_the_readme_shows_what_the_command_prints(tmp_path: Path) -> None:
    process = start(tmp_path)
    assert process.wait(patience(840)) == 0, said(tmp_path)
    shown = figures(README.read_text(encoding="utf-8"))
    assert figures(said(tmp_path)) == pytest.approx(shown, rel=APART)
    held_out = [loss for _, _, loss in json.loads((tmp_path / "summary.json").read_text())["validation_loss"]]
    on_screen = [float(loss) for loss in re.findall(r"tokens/?.*  loss ([\d.]+)  held-out", said(tmp_path))]
    assert len(on_screen) > 10
    last = on_screen[len(on_screen) // 2 :]
    assert max(abs(one - other) for one, other in pairwise(last)) < JUMP, last
    assert max(later - earlier for earlier, later in pairwise(held_out)) < RISE, held_out
