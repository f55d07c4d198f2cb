"""Each single change of a checkpoint's config.json gives what transformers gives for it, or is refused."""

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
from protocol.run.model import Family
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


STRETCHED: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
    },
}  # fmt: skip
# what other types have, and what people's tools write
OTHERS: dict[str, Any] = {
    "attention_factor": 0.7, "beta_fast": 16.0, "beta_slow": 2.0, "factor": 2.0, "finetuned": True,
    "high_freq_factor": 4.0, "long_factor": [1.0, 1.0], "low_freq_factor": 1.0, "mscale": 0.7, "mscale_all_dim": 0.5,
    "original_max_position_embeddings": 16, "short_factor": [1.0, 1.0], "truncate": False,
    "attn_factor": 1.0, "rope_theta": 10_000.0, "type": "yarn", "a": "b",
}  # fmt: skip


@pytest.mark.parametrize("kind", STRETCHED)
def test_settings_of_positions_that_transformers_passes_over_are_passed_over(
    kind: str, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(tmp_path / "model", "llama")
    refused, wrong = [], []
    for name, value in OTHERS.items():
        if name not in STRETCHED[kind]:
            rope = {"rope_theta": 10_000.0, **STRETCHED[kind], name: value, "rope_type": kind}
            checkpoint.change("rope_parameters", rope)
            found = checkpoint.here()
            if found is None:
                refused.append(name)
            elif not torch.allclose(found, checkpoint.by_transformers(), atol=2e-5, rtol=1e-5):
                wrong.append(name)
    assert (refused, wrong) == ([], [])


@pytest.mark.parametrize(
    ("settings", "is_taken"),
    [
        (["full_attention"] * 3, True),
        (["sliding_attention"] * 3, True),
        (["full_attention", "sliding_attention", "sliding_attention"], True),
        (["full_attention", "full_attention", "sliding_attention"], True),
        (["sliding_attention", "full_attention", "sliding_attention"], False),
        (["sliding_attention", "full_attention", "full_attention"], False),
        (["full_attention"] * 2, False),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_types_of_layers_have_the_last_word(
    family: Family, settings: list[str], is_taken: bool, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(tmp_path / "model", family)
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    checkpoint.config |= window
    checkpoint.change("layer_types", settings)
    found = checkpoint.here()
    assert (found is not None) == is_taken
    if found is not None:
        assert torch.allclose(found, checkpoint.by_transformers(), atol=2e-5, rtol=1e-5)
