"""An export loads in transformers 4 as in the installed one: the same logits, the same tokens."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from bootstrap.creating.choosing import RunOptions
from bootstrap.export.checkpoint import save_json
from bootstrap.export.model_config import config_of
from bootstrap.export.tokenizer import tokenizer_of_run
from protocol.run.model import Family
from tests.patience import patience
from tests.pretrained import saved_model
from tests.unit.tokenizers_made_here import bpe

OLD = ("transformers==4.57.3", "tokenizers>=0.22,<0.23", "huggingface-hub>=0.34,<1")
TEXT = "def größer(x):\n    return x > 1"
ROPES = {
    "theta": {"rope_type": "default", "rope_theta": 500_000.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    },
}  # fmt: skip
READ = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
told = {"version": transformers.__version__}
for name in sys.argv[2:]:
    ids = AutoTokenizer.from_pretrained(name)(sys.argv[1])["input_ids"]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(name)(torch.tensor([ids])).logits
    told[name] = [ids, logits.double().flatten().tolist()]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def transformers_4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformers-4")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *OLD]
    done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=patience(300))
    if done.returncode:
        pytest.skip(f"no index to install transformers 4 from: {done.stderr.strip()[-200:]}")
    return folder


def export_like(directory: Path, family: Family, rope: dict[str, object]) -> Path:
    """A run founded on a checkpoint, and the same weights with the config and tokenizer that an export has."""
    source, export = directory / f"{family}-source", directory / f"{family}-export"
    saved_model(source, family, vocab_size=512, max_position_embeddings=256, rope_parameters=rope)
    (source / "tokenizer.json").write_bytes(bpe())
    manifest, raw = RunOptions("tiny", from_checkpoint=str(source)).resolved()
    export.mkdir()
    tokenizer = tokenizer_of_run(manifest, raw)
    tokenizer.save(export)
    save_json(config_of(manifest, "float32", tokenizer.special_ids()), export / "config.json")
    shutil.copy(source / "model.safetensors", export)
    return export


@pytest.mark.timeout(patience(600))
@pytest.mark.parametrize("rope", ROPES)
def test_both_give_the_same_logits_and_tokens(rope: str, transformers_4: Path, tmp_path: Path) -> None:
    exports = [export_like(tmp_path, family, ROPES[rope]) for family in ("llama", "qwen3")]
    done = subprocess.run(
        [sys.executable, "-c", READ, TEXT, *map(str, exports)],
        env=os.environ | {"PYTHONPATH": str(transformers_4)},
        capture_output=True, text=True, check=False, timeout=patience(300),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told.pop("version").startswith("4.")
    assert not transformers.__version__.startswith("4.")
    for export in exports:
        ids, logits = told[str(export)]
        assert AutoTokenizer.from_pretrained(export)(TEXT)["input_ids"] == ids
        with torch.no_grad():
            ours = AutoModelForCausalLM.from_pretrained(export)(torch.tensor([ids])).logits
        torch.testing.assert_close(
            ours.double().flatten(), torch.tensor(logits).double(), rtol=1e-5, atol=1e-5
        )
