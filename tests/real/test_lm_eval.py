"""An export in lm-evaluation-harness, through its ordinary `hf` interface, on a task made here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bootstrap.export.exporting import export
from bootstrap.export.order import ExportOrder
from tests.swarm.models_out import visiting

TASK = """\
task: own_words
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed: pip install '.[eval]'"
)
@pytest.mark.timeout(300)
def test_the_harness_measures_an_export(tmp_path: Path) -> None:
    """The made-up words have twelve letters; a trained model finds them likelier than digits."""
    directory, task, results = tmp_path / "model", tmp_path / "task", tmp_path / "results"

    async def look(swarm: object, observer: object) -> None:
        await export(observer, ExportOrder(directory))  # type: ignore[arg-type]

    visiting(1, look, inner__total_steps=60)
    task.mkdir()
    questions = [
        {"question": "the sin", "choices": [" 4711", " tea "], "answer": 1},
        {"question": "a shoe i", "choices": ["s in", "{}%$"], "answer": 0},
        {"question": "nine lie", "choices": ["s tha", "!!?ZQ"], "answer": 0},
    ]
    lines = task / "questions.jsonl"
    lines.write_text("".join(json.dumps(question) + "\n" for question in questions))
    (task / "own_words.yaml").write_text(TASK.format(file=lines))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    command = [
        sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={directory},dtype=float32",
        "--tasks", "own_words", "--include_path", str(task), "--device", "cpu", "--batch_size", "2",
        "--output_path", str(results),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (told,) = results.rglob("results_*.json")
    assert json.loads(told.read_text())["results"]["own_words"]["acc,none"] == 1.0
