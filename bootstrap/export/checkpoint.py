"""The files of an export: safetensors in shards with their index, config.json, and the model card.

They have the layout of transformers, so that it loads them without anything of ours.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import save_file

from bootstrap.export.fetching import Source
from node.model.flat import Slice, layout
from node.model.stage import parameter_shapes
from protocol.records.receipts import Contribution
from protocol.run.manifest import Manifest, as_toml
from protocol.version import own_version

PATTERN = "model{suffix}.safetensors"
MOST_NAMED = 50  # contributors in the model card
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Weight:
    """One named parameter, and its place in a stage's flat weights."""

    stage: int
    place: Slice


class Flat(Protocol):
    """The flat weights of a stage, of which a part at a time is taken."""

    def __getitem__(self, span: slice) -> NDArray[np.float32]: ...


def weights_of(manifest: Manifest) -> dict[str, Weight]:
    """Every parameter of the whole model under its name in a checkpoint, in the order of the stages.

    Where the output layer is the embedding, it is there once, as transformers saves it.
    """
    weights: dict[str, Weight] = {}
    for stage in range(manifest.stages):
        for place in layout(parameter_shapes(manifest, stage)):
            weights.setdefault(place.name, Weight(stage, place))
    if manifest.model.tied_embeddings:
        weights.pop(HEAD, None)
    return weights


def write_shards(
    manifest: Manifest, stages: Sequence[Flat], directory: Path, dtype: torch.dtype, most: int
) -> Iterator[str]:
    """Write files of at most `most` bytes, or of one larger tensor, and yield the name of each when it is there.

    `stages` are the flat weights of each, read as they are needed: memory for one shard is taken. Raises `OSError`.
    """
    weights = weights_of(manifest)
    shapes = {
        name: torch.empty(weight.place.shape, dtype=dtype, device="meta") for name, weight in weights.items()
    }
    split = split_torch_state_dict_into_shards(shapes, filename_pattern=PATTERN, max_shard_size=most)
    for file, names in split.filename_to_tensors.items():
        tensors = {name: _tensor(weights[name], stages, dtype) for name in names}
        _save(tensors, directory / file)
        (directory / file).chmod(
            0o666 & ~_umask()
        )  # as every other file: safetensors lets nobody else read it
        yield file
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        yield INDEX


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write a file of safetensors; its library has an error of its own for a full disk. Raises `OSError`."""
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error (\d{1,4})", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), file) from None


def _umask() -> int:
    mask = os.umask(0)  # it can only be read by setting it
    os.umask(mask)
    return mask


def _tensor(weight: Weight, stages: Sequence[Flat], dtype: torch.dtype) -> torch.Tensor:
    flat = stages[weight.stage][weight.place.start : weight.place.stop]
    return torch.from_numpy(np.array(flat)).view(weight.place.shape).to(dtype)


def save_json(contents: Mapping[str, object], path: Path) -> None:
    """Write JSON as transformers writes config.json and its like. Raises `OSError`."""
    path.write_text(json.dumps(contents, indent=2, sort_keys=True) + "\n", encoding="utf-8")


SOURCES = {
    "python-stdlib": "the .py files of the Python standard library",
    "local": "text that each volunteer chose; it is not recorded which",
}


@dataclass(frozen=True)
class Facts:
    """The known facts of an export. Losses are in nats per token; None is unknown."""

    run_id: str
    manifest: Manifest
    sources: Sequence[Source]
    parameters: int
    dtype: str
    tokens: int | None = None  # that the replicas that are there now have trained on since they started
    training_loss: float | None = None  # of the last stage's last steps
    validation_loss: float | None = None
    directory: str = "model"
    contributions: Sequence[Contribution] = ()
    tokenizer_fingerprint: str = ""  # of what it does; empty where bytes are tokens
    carried: str = ""  # the model card's section on the checkpoint's files

    def as_json(self) -> str:
        stages = [
            {
                "stage": source.stage,
                "replicas": [{"peer": str(d.peer), "step": d.step, "round": d.round} for d in source.donors],
                **({} if source.copy is None else {"copy_saved": source.copy.copy.saved}),
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
            "tokenizer_fingerprint": self.tokenizer_fingerprint,
            "program": own_version(),
            "manifest": self.manifest.model_dump(),
        }
        return json.dumps(known, indent=2)


def model_card(facts: Facts) -> str:
    """Markdown with the front matter that model hubs read."""
    manifest, start = facts.manifest, facts.manifest.start
    if start is not None:  # the files themselves are beside the card
        manifest = manifest.model_copy(update={"start": start.model_copy(update={"files": ""})})
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

{_contributors(facts)}{facts.carried}## Load it

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


def _contributors(facts: Facts) -> str:
    """The table of contributors. Names are what strangers call themselves: shown as text, whatever is in them."""
    if not facts.contributions:
        return ""
    rows = [
        f"| {markdown_text(one.name) or '-'} | `{one.peer}` | {one.tokens:,} |"
        for one in facts.contributions[:MOST_NAMED]
    ]
    more = len(facts.contributions) - len(rows)
    rows += (
        [f"| and {more:,} more | | {sum(c.tokens for c in facts.contributions[MOST_NAMED:]):,} |"]
        if more
        else []
    )
    table = "\n".join(["| who | peer | tokens, signed for by others |", "|---|---|---|", *rows])
    return f"## Contributors\n\n{table}\n\n"


def markdown_text(text: str) -> str:
    """Letters, digits and spaces as they are, all else as character references."""
    return "".join(c if c.isalnum() or c == " " else f"&#{ord(c)};" for c in text)


def _weights(facts: Facts) -> str:
    is_mean = any(len(source.donors) > 1 for source in facts.sources)
    of = "the mean of several replicas of a stage" if is_mean else "one replica of each stage"
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
    for source in facts.sources:
        if source.copy is not None:
            lines += ["", f"Nobody served stage {source.stage}: its weights are of {source.copy}."]
    return "\n".join(lines)
