"""Real nodes whose run is complete: a visitor generates from them, measures them and takes their model along.

Nodes, and commands that ask them, find no transformers, as if it were not installed; what they wrote is loaded by it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from bootstrap.tools_cli import app
from protocol.files.installation import extra_line
from protocol.run.manifest import preset_text
from tests.real.daemons import NodeDaemon, SeedDaemon, run_tool

PROMPT = "def __init__(self"
TOKENS = 40


def printed(*arguments: str) -> str:
    """By `noloco …` in a process of its own."""
    done = run_tool(*arguments, patience=200.0)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def _without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For processes that are started."""
    package = tmp_path / "hidden" / "transformers.py"
    package.parent.mkdir()
    package.write_text("raise ModuleNotFoundError(\"No module named 'transformers'\", name='transformers')\n")
    places = [str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_without_transformers")
def test_a_finished_swarm_its_export_and_transformers_say_the_same(tmp_path: Path) -> None:
    manifest = preset_text("tiny").replace("total_steps = 10_000", "total_steps = 60")
    (tmp_path / "run.toml").write_text(manifest)
    (tmp_path / "text.txt").write_text("class Text:\n    pass\n" * 30)
    daemons: list[SeedDaemon | NodeDaemon] = [
        SeedDaemon(tmp_path / "run", "--manifest", str(tmp_path / "run.toml"))
    ]
    try:
        address = daemons[0].join_address()  # type: ignore[union-attr]
        nodes = [NodeDaemon(tmp_path / f"node{i}", "--join", address, "--stage", str(i)) for i in (0, 1)]
        daemons += nodes
        for node in nodes:
            node.wait_for_event("finished", patience=200.0)
        live = printed("generate", PROMPT, "--join", address, "--tokens", str(TOKENS))
        measured = printed("eval", "--join", address, "--data", str(tmp_path / "text.txt"))
        model = tmp_path / "model"
        assert str(model) in printed("export", "--join", address, "--out", str(model))
    finally:
        for daemon in reversed(daemons):
            daemon.kill()

    for command in (["generate", "a"], ["eval", "--data", str(tmp_path / "text.txt")]):
        refused = run_tool(*command, "--model", str(model), patience=200.0)
        assert refused.returncode == 2
        assert refused.stderr.strip().endswith(f"{extra_line('hf')}."), refused.stderr
    here = CliRunner().invoke(app, ["generate", PROMPT, "--model", str(model), "--tokens", str(TOKENS)])
    assert here.output == live
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    inputs = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        ids = loaded.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)[0, len(PROMPT) :]
    assert tokenizer.decode(ids, skip_special_tokens=True) == live.removesuffix("\n")
    again = CliRunner().invoke(app, ["eval", "--model", str(model), "--data", str(tmp_path / "text.txt")])
    assert again.output.split(", by ")[0] == measured.split(", through ")[0]
