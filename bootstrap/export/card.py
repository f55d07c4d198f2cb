"""README.md of an export: which run the model comes from, what it was trained on, how to load it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from bootstrap.export.sources import Source
from protocol.manifest import Manifest
from protocol.manifest_text import as_toml

SOURCES = {
    "python-stdlib": "the .py files of the Python standard library",
    "local": "text that each volunteer chose; it is not recorded which",
}


@dataclass(frozen=True)
class Facts:
    """What an export is known to be. Losses are in nats per token; None is not known."""

    run_id: str
    manifest: Manifest
    sources: Sequence[Source]
    parameters: int
    dtype: str
    tokens: int | None = None  # that the replicas that are there now have trained on since they started
    training_loss: float | None = None  # of the last stage's last steps
    validation_loss: float | None = None
    directory: str = "model"

    @property
    def is_mean(self) -> bool:
        return any(len(source.donors) > 1 for source in self.sources)

    def as_json(self) -> str:
        stages = [
            {
                "stage": source.stage,
                "replicas": [{"peer": str(d.peer), "step": d.step, "round": d.round} for d in source.donors],
            }
            for source in self.sources
        ]
        known = {
            "run": self.run_id,
            "name": self.manifest.name,
            "parameters": self.parameters,
            "dtype": self.dtype,
            "tokens": self.tokens,
            "training_loss": self.training_loss,
            "validation_loss": self.validation_loss,
            "stages": stages,
            "manifest": self.manifest.model_dump(),
        }
        return json.dumps(known, indent=2)


def model_card(facts: Facts) -> str:
    """Markdown with the front matter that model hubs read."""
    manifest = facts.manifest
    tags = "library_name: transformers\npipeline_tag: text-generation\ntags:\n- noloco"
    return f"""---
{tags}
---
# {manifest.name}

{facts.parameters:,} parameters, trained by volunteers over the internet with noloco-node: {manifest.stages} pipeline
stages, replicas of each averaged in pairs ([arXiv 2506.10911](https://arxiv.org/abs/2506.10911)).

| | |
|---|---|
{_rows(facts)}

## Weights

{_weights(facts)}

## Load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({facts.directory!r})
tokenizer = AutoTokenizer.from_pretrained({facts.directory!r})
inputs = tokenizer("Once", return_tensors="pt", add_special_tokens=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0], skip_special_tokens=True))
```

or `noloco generate "Once" --model {facts.directory}`.

## The run's manifest

```toml
{as_toml(manifest)}```
"""


def _rows(facts: Facts) -> str:
    manifest = facts.manifest
    rows = [("run", f"`{facts.run_id}`")]
    rows.append(("numbers are", "bfloat16" if facts.dtype == "bf16" else "float32"))
    rows.append(("context", f"{manifest.data.sequence_tokens:,} tokens"))
    rows.append(("trained on", SOURCES.get(manifest.data.source, manifest.data.source)))
    if facts.tokens is not None:
        rows.append(("tokens", f"{facts.tokens:,}, counted by the replicas present at the export"))
    if facts.training_loss is not None:
        rows.append(("training loss", f"{facts.training_loss:.4f} nats per token, in the last steps"))
    if facts.validation_loss is not None:
        rows.append(("validation loss", f"{facts.validation_loss:.4f} nats per token, on held-out text"))
    return "\n".join(f"| {name} | {value} |" for name, value in rows)


def _weights(facts: Facts) -> str:
    of = "the mean of several replicas of a stage" if facts.is_mean else "one replica of each stage"
    lines = [
        f"The slow weights φ of {of}:",
        "",
        "| stage | replica | inner steps | round |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {source.stage} | `{donor.peer}` | {donor.step:,} | {donor.round:,} |"
        for source in facts.sources
        for donor in source.donors
    ]
    return "\n".join(lines)
