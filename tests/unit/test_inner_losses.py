"""Thirty inner steps against the losses that stages built from transformers' modules had, before they had their own.

tests/data/golden/inner_losses.json was written with transformers 5.24.0 and torch 2.13.0; no code here writes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.replicas import manifest_cut, replicas_of, train_step

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "golden" / "inner_losses.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", GOLDEN["runs"])
def test_thirty_inner_steps_end_where_they_always_did(name: str) -> None:
    run = GOLDEN["runs"][name]
    replicas = replicas_of(manifest_cut(run["stages"], **run["settings"]))
    losses = [train_step(replicas, seed) for seed in range(30)]
    assert losses == pytest.approx(run["losses"], rel=1e-5)
