"""Sequences longer than a model's positions are told of: at founding, and by `noloco manifest check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bootstrap.creating.choosing import RunOptions
from bootstrap.creating.positions import longer_than_positions
from bootstrap.tools_cli import app
from protocol.run.manifest import PRESETS, load_preset, preset_text
from tests.pretrained import saved_model
from tests.swarm.micro import micro_manifest

DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}


@pytest.mark.parametrize(
    ("positions", "tokens", "is_told"), [(0, 128, False), (64, 65, True), (64, 64, False)]
)
def test_it_is_told_from_the_first_token_on(positions: int, tokens: int, is_told: bool) -> None:
    manifest = micro_manifest(model__max_positions=positions, data__sequence_tokens=tokens)
    assert bool(longer_than_positions(manifest)) is is_told


def test_no_preset_is_longer_than_its_model() -> None:
    assert not any(longer_than_positions(load_preset(name)) for name in PRESETS)


@pytest.mark.parametrize("changes", [{}, DYNAMIC], ids=["plain", "dynamic"])
@pytest.mark.parametrize("tokens", [64, 128])
def test_founding_from_a_checkpoint(
    changes: dict[str, Any], tokens: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_model(tmp_path / "model", **changes)
    own = tmp_path / "own.toml"
    without_model = preset_text("tiny").split("[model]")
    rest = without_model[1][without_model[1].index("\n[") :]
    text = (without_model[0] + rest).replace("sequence_tokens = 128", f"sequence_tokens = {tokens}")
    own.write_text(text, encoding="utf-8")
    manifest, _ = RunOptions(file=own, from_checkpoint=str(tmp_path / "model")).resolved()
    assert manifest.data.sequence_tokens == tokens
    told = [said for said in caplog.messages if "positions" in said]
    assert len(told) == (tokens > 64)
    assert all("Set data.sequence_tokens to 64 or less" in said for said in told)


def test_the_check_of_a_manifest_tells_it(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(preset_text("tiny").replace("[model]", "[model]\nmax_positions = 64"), encoding="utf-8")
    shown = CliRunner().invoke(app, ["manifest", "check", str(own)])
    assert "64 positions" in " ".join(shown.output.split())
    notes = json.loads(CliRunner().invoke(app, ["manifest", "check", str(own), "--json"]).stdout)["notes"]
    assert any("Set data.sequence_tokens to 64 or less" in note for note in notes)
