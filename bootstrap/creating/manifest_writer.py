"""A manifest as TOML for people: every setting in its place, with what it means beside it."""

from __future__ import annotations

import json
from typing import Any

from protocol.manifest import Manifest

HEAD = """\
# The manifest of one training run. Founding signs it, and from then on it never changes.
#   noloco manifest check {file}              memory, bytes and seconds that a run by it takes
#   noloco-bootstrap --manifest {file}        found the run
# docs/manifest.md explains every setting.
"""
MEANINGS = {
    "name": "for people",
    "stages": "pipeline stages; the cut makes the slowest as fast as it can be",
    "routing": "each microbatch to a random replica of the next stage",
    "model": "a decoder, in the words of transformers' configurations",
    "model.vocab_size": "at least 256 where bytes are tokens",
    "model.kv_heads": "0: as many as heads",
    "model.head_dim": "0: hidden_size by heads",
    "model.tied_embeddings": "the head multiplies with the embedding's matrix",
    "model.seed": "of the first weights, the same for everyone",
    "data": "what replicas of stage 0 draw sequences from",
    "data.source": '"local": each volunteer of stage 0 names text with --data',
    "data.tokenizer": '"bytes", or the hash that --tokenizer gives',
    "data.sequence_tokens": "in a sequence",
    "data.held_out": "fraction of the documents that nobody trains on",
    "inner": "AdamW, and what one inner step of a replica consumes",
    "inner.learning_rate": "after a linear warm-up; cosine to the minimum at total_steps",
    "inner.microbatches": "in one inner step",
    "inner.sequences": "in one microbatch; a node that cannot hold them computes it in slices",
    "inner.staleness": "1: the next step's forward passes may begin before this one is applied",
    "outer": "NoLoCo's averaging with one random partner every inner_steps steps",
    "outer.gamma": "pull between replicas; below 2(1 - alpha^2)",
    "outer.inner_steps": "k, in a round",
    "outer.window": "a round may end this fraction earlier or later, to meet its partner",
    "outer.pace": '"time": as many steps as the median replica does in its k',
    "outer.overlap": '"phi-early": most of the exchange goes while training goes on',
    "outer.clip": "the defence's radius in usual distances; 0 trusts everybody",
    "wire": "how tensors travel: fp32, fp16, bf16, int8; between stages also eden4, eden2",
    "limits": "in seconds, where deadlines start before they adapt",
    "limits.record_lifetime": "of a node's record in the DHT",
}


def toml_of(manifest: Manifest, file: str) -> str:
    """All settings, defaults included. Reading it gives `manifest` again."""
    settings = manifest.model_dump(exclude_none=True)
    sections = {name: value for name, value in settings.items() if isinstance(value, dict)}
    lines = [HEAD.format(file=file)]
    lines += [_line(name, name, value) for name, value in settings.items() if name not in sections]
    for section, values in sections.items():
        lines += ["", *([f"# {MEANINGS[section]}"] if section in MEANINGS else []), f"[{section}]"]
        lines += [_line(f"{section}.{name}", name, value) for name, value in values.items()]
    return "\n".join(lines) + "\n"


def _line(place: str, name: str, value: Any) -> str:
    meaning = MEANINGS.get(place)
    written = f"{name} = {_value(value)}"
    return f"{written:<32}# {meaning}" if meaning else written


def _value(value: Any) -> str:
    """TOML writes what settings are made of as JSON does, but for tables."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{name} = {_value(inner)}' for name, inner in value.items())} }}"
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
