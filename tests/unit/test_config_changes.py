"""Each single change of a checkpoint's config.json gives what transformers gives for it, or is told in a sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from node.model.passes import evaluate_through
from protocol.errors import NolocoError
from protocol.model import Family
from tests.pretrained import saved_model
from tests.unit.test_pretrained import replicas_of, run_of

FAMILIES: dict[Family, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 9, "head_dim": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
}
# which the hub's have and transformers' own do not
BESIDE = (
    "architectures", "attention_bias", "auto_map", "dtype", "head_dim", "layer_types", "max_window_layers",
    "mlp_bias", "original_max_position_embeddings", "partial_rotary_factor", "quantization_config", "rope_scaling",
    "rope_theta", "sliding_window", "tie_word_embeddings", "torch_dtype", "use_sliding_window",
)  # fmt: skip
DROPPED = "dropped"
VALUES: tuple[Any, ...] = (
    DROPPED,
    None,
    True,
    False,
    0,
    1,
    3,
    7,
    -1,
    0.5,
    1e-5,
    "x",
    "",
    "3",
    [],
    [1],
    {},
    {"a": 1},
)
TOKENS = torch.arange(40)[None]
SOME: tuple[tuple[Family, str, Any], ...] = (
    ("llama", "tie_word_embeddings", None),
    ("llama", "tie_word_embeddings", True),
    ("llama", "attention_bias", False),
    ("llama", "num_hidden_layers", 1),
    ("llama", "rms_norm_eps", 0.5),
    ("llama", "model_type", []),
    ("mistral", "sliding_window", None),
    ("mistral", "sliding_window", 3),
    ("mistral", "sliding_window", 0),
    ("qwen2", "max_window_layers", DROPPED),
    ("qwen2", "rope_scaling", {"a": 1}),
    ("qwen3", "tie_word_embeddings", DROPPED),
    ("qwen3", "rope_parameters", False),
)


class Checkpoint:
    """A model as transformers saved it, whose config.json is changed in one place."""

    def __init__(self, directory: Path, family: Family) -> None:
        self.directory = directory
        saved_model(directory, family, **FAMILIES[family])
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self.first = self.by_transformers()

    def change(self, name: str, value: object) -> None:
        changed = {key: old for key, old in self.config.items() if key != name}
        if value != DROPPED:
            changed[name] = value
        (self.directory / "config.json").write_text(json.dumps(changed))

    @torch.no_grad()
    def by_transformers(self) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32).eval()
        logits: torch.Tensor = model(TOKENS).logits
        return logits

    def here(self) -> torch.Tensor | None:
        """The logits of a run from it; None where founding says what is wrong."""
        try:
            manifest = run_of(self.directory, stages=1)
        except NolocoError:
            return None
        return evaluate_through([r.passes for r in replicas_of(self.directory, manifest)], TOKENS)

    def holds(self, name: str, value: object) -> bool:
        """Return whether the change gives what it should."""
        self.change(name, value)
        found = self.here()
        if found is None:
            return True
        try:
            expected = self.by_transformers()
        except Exception:  # noqa: BLE001  whatever it has against the folder
            # it has no word for a null; here that is the default, with which these weights were saved
            return value is None and torch.allclose(found, self.first, atol=2e-5, rtol=1e-5)
        return torch.allclose(found, expected, atol=2e-5, rtol=1e-5)


def changes_of(config: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name in sorted({*config, *BESIDE}):
        for value in VALUES:
            if not (type(value) is type(config.get(name)) and value == config.get(name)):
                yield name, value


@pytest.mark.parametrize(("family", "name", "value"), SOME)
def test_a_change_gives_what_transformers_gives_or_is_told(
    family: Family, name: str, value: object, tmp_path: Path
) -> None:
    assert Checkpoint(tmp_path / "model", family).holds(name, value)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_every_change_gives_what_transformers_gives_or_is_told(family: Family, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "model", family)
    assert [c for c in changes_of(checkpoint.config) if not checkpoint.holds(*c)] == []
