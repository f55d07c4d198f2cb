"""A run is founded from somebody's model, trained and exported, and the next run is founded from that export."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.journeys.chat_model import CHAT
from tests.patience import patience
from tests.real.daemons import NodeDaemon, SeedDaemon, run_tool
from tests.unit.corpora import as_jsonl, made_up
from tests.unit.test_carried_files import chat_model, sums

STEPS, FEW_STEPS = 30, 6
FOREVER = 20_000
MANIFEST = """
name = "from-a-checkpoint"
stages = 2
[data]
source = "local"
sequence_tokens = 64
[inner]
optimizer = "muon"
learning_rate = 2e-3
muon_learning_rate = 8e-3
min_learning_rate = 2e-4
warmup_steps = 3
total_steps = {steps}
microbatches = 2
sequences = 4
[outer]
inner_steps = 5
"""
MINUTES = patience(240.0)
NEAR = 5  # steps whose losses are looked at together


class Run:
    """A run of real processes: its seed peer, and a node of each stage that has the checkpoint."""

    def __init__(self, directory: Path, model: Path, steps: int) -> None:
        self._directory = directory
        directory.mkdir()
        manifest = directory / "run.toml"
        manifest.write_text(MANIFEST.format(steps=steps), encoding="utf-8")
        start = ("--from-checkpoint", str(model))
        self.seed = SeedDaemon(directory / "run", "--manifest", str(manifest), *start)
        self.join = ("--join", self.seed.join_address())
        text = ("--data", as_jsonl(directory / "text.jsonl", made_up(400)))
        self.nodes = [self.node(0, "first", *start, *text), self.node(1, "last", *start)]

    def node(self, stage: int, name: str, *settings: str) -> NodeDaemon:
        return NodeDaemon(self._directory / name, *self.join, "--stage", str(stage), *settings)

    def losses(self) -> list[float]:
        return self.nodes[0].losses()

    def end(self, *later: NodeDaemon) -> None:
        for node in (*self.nodes, *later):
            assert node.leave() == 0, node.output
            assert not node.events("step-left-out"), node.output
        self.seed.kill()


def assert_equal_tokenizers(one: Path, two: Path) -> None:
    first, second = (AutoTokenizer.from_pretrained(folder) for folder in (one, two))
    assert first.get_vocab() == second.get_vocab()
    assert first.chat_template == second.chat_template
    assert first.chat_template
    words = [tokenizer.apply_chat_template(CHAT, tokenize=False) for tokenizer in (first, second)]
    assert words[0] == words[1]
    ids = [
        tokenizer(text, add_special_tokens=False).input_ids
        for tokenizer, text in zip((first, second), words, strict=True)
    ]
    assert ids[0] == ids[1]


def of_no_weights(directory: Path) -> dict[str, str]:
    """The hashes of the files of a checkpoint that say something of its model or tokenizer."""
    return {name: sha for name, sha in sums(directory).items() if not name.startswith(("model", "SHA256"))}


@pytest.mark.timeout(1_500)
def test_found_from_a_checkpoint_train_export_and_found_from_the_export(tmp_path: Path) -> None:
    model, export = tmp_path / "model", tmp_path / "export"
    chat_model(model)

    first = Run(tmp_path / "first", model, STEPS)
    for node in first.nodes:
        node.wait_for_step(STEPS, MINUTES)
    begun = first.losses()
    assert mean(begun[-NEAR:]) < mean(begun[:NEAR]) - 0.1, begun
    done = run_tool("export", "--out", str(export), *first.join)
    assert done.returncode == 0, done.stderr
    first.end()
    assert_equal_tokenizers(model, export)
    was, now = (AutoModelForCausalLM.from_pretrained(folder).config for folder in (model, export))
    assert (was.vocab_size, was.hidden_size) == (now.vocab_size, now.hidden_size)

    second = Run(tmp_path / "second", export, FOREVER)
    second.nodes[1].wait_for_step(NEAR, MINUTES)
    later = second.node(1, "later")  # has no checkpoint, and needs none
    assert later.wait_for_event("downloaded", MINUTES)
    before = later.wait_for_event("serving")["step"]
    later.wait_for_step(before + STEPS, MINUTES)
    assert second.nodes[0].step > STEPS
    assert mean(second.losses()[:NEAR]) < mean(begun[:NEAR]) - 0.1, (begun, second.losses())
    second.end(later)
    facts = json.loads((export / "noloco.json").read_text(encoding="utf-8"))
    assert facts["manifest"]["start"]["name"] == "model"


@pytest.mark.timeout(1_500)
def test_what_a_checkpoint_says_beside_its_weights_is_the_same_after_two_runs(tmp_path: Path) -> None:
    folders = [chat_model(tmp_path / "model")]
    said = of_no_weights(folders[0])
    assert said.keys() == {
        "config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json",
        "special_tokens_map.json",
    }  # fmt: skip
    for name in ("first", "second"):
        run = Run(tmp_path / name, folders[-1], FEW_STEPS)
        for node in run.nodes:
            node.wait_for_step(FEW_STEPS, MINUTES)
        folders.append(tmp_path / f"{name}-export")
        done = run_tool("export", "--out", str(folders[-1]), *run.join)
        assert done.returncode == 0, done.stderr
        run.end()
        assert of_no_weights(folders[-1]) == said
    assert len({sums(folder)["model.safetensors"] for folder in folders}) == len(folders)
