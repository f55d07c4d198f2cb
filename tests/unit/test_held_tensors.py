"""The tensors of a checkpoint's files are the truth: config.json agrees, is corrected in a line, or is refused."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from node.model.passes import evaluate_through
from protocol.errors import CheckpointError
from tests.pretrained import saved_model
from tests.unit.test_pretrained import replicas_of, run_of

Weights = dict[str, torch.Tensor]
TOKENS = torch.arange(40)[None]
LAYER = "model.layers.1."


def with_weights(directory: Path, change: Callable[[Weights], Weights], **config: Any) -> Path:
    """A checkpoint with other tensors and settings than transformers saved."""
    file, settings = directory / "model.safetensors", directory / "config.json"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    settings.write_text(json.dumps(json.loads(settings.read_text()) | config))
    return directory


def more(**shapes: tuple[int, ...]) -> Callable[[Weights], Weights]:
    """Tensors of ones added, in whose names __ stands for a dot."""
    return lambda weights: (
        weights | {name.replace("__", "."): torch.ones(shape) for name, shape in shapes.items()}
    )


def renamed(prefix: str) -> Callable[[Weights], Weights]:
    return lambda weights: {prefix + name: tensor for name, tensor in weights.items()}


def assert_as_transformers(model: Path) -> None:
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(model).eval()(TOKENS).logits
    found = evaluate_through([replica.passes for replica in replicas_of(model, run_of(model))], TOKENS)
    assert torch.allclose(found, expected, atol=2e-5, rtol=1e-5)


STRANGE: dict[str, tuple[Callable[[Weights], Weights], dict[str, Any], str]] = {
    "biases that it denies": (lambda w: w, {"attention_bias": False}, "k_proj.bias.*set attention_bias to true"),
    "biases of the layers' widths": (lambda w: w, {"mlp_bias": False}, "bias.*set mlp_bias to true"),
    "fewer layers": (lambda w: w, {"num_hidden_layers": 2}, "says num_hidden_layers 2, and its files hold 3"),
    "more layers": (lambda w: w, {"num_hidden_layers": 4}, "says num_hidden_layers 4, and its files hold 3"),
    "norms": (more(model__layers__1__self_attn__q_norm__weight=(4,)), {}, 'model_type "qwen3"'),
    "an adapter inside": (
        more(model__layers__1__self_attn__q_proj__lora_A__weight=(2, 16)),
        {},
        "adapter that is not merged",
    ),
    "adapter's names": (renamed("base_model.model."), {}, "adapter that is not merged"),
    "a compiled model": (renamed("_orig_mod."), {}, "of a compiled model"),
    "a wrapper": (renamed("module."), {}, "in a wrapper for training"),
    "a model in another": (renamed("language_model."), {}, "of a model within another one"),
    "scales": (more(model__layers__1__mlp__up_proj__weight_scale=(1,)), {}, "quantized weights"),
    "packed": (more(model__layers__1__mlp__up_proj__qweight=(1,)), {}, "quantized weights"),
    "of MLX": (more(model__layers__1__mlp__up_proj__biases=(1,)), {}, "quantized weights"),
    "experts": (more(model__layers__1__mlp__experts__0__up_proj__weight=(1,)), {}, "mixture of experts"),
    "sinks": (more(model__layers__1__self_attn__sinks=(4,)), {}, "no place for: .*sinks. Correct it, or save"),
    "a head of zeros and no word": (more(nobody__knows=(4,)), {}, "no place for: nobody.knows"),
    "wider": (lambda w: w, {"intermediate_size": 48}, r"\(32, 16\).*makes it.*Correct intermediate_size and"),
    "narrower": (lambda w: w, {"hidden_size": 8}, "Correct vocab_size and hidden_size there"),
    "rows": (lambda w: w, {"vocab_size": 256}, r"\(300, 16\).*Correct vocab_size and hidden_size there"),
    "keys": (lambda w: w, {"num_key_value_heads": 4}, "Correct num_attention_heads, num_key_value_heads, head_dim"),
    "width of heads": (lambda w: w, {"head_dim": 8}, "Correct num_attention_heads, num_key_value_heads, head_dim"),
    "no head": (
        lambda w: {name: tensor for name, tensor in w.items() if name != "lm_head.weight"},
        {},
        "has no head .*does not say tie_word_embeddings. Set it to true",
    ),
    "without the first part of the names": (
        lambda w: {name.removeprefix("model."): tensor for name, tensor in w.items() if "lm_head" not in name},
        {"tie_word_embeddings": True},
        "of a model without its head",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STRANGE)
def test_what_config_json_has_no_place_for_is_refused_by_name(case: str, tmp_path: Path) -> None:
    change, config, words = STRANGE[case]
    was: dict[str, Any] = {"attention_bias": True, "mlp_bias": True} if "biases" in case else {}
    saved_model(tmp_path / "model", **was | ({"vocab_size": 300} if case == "rows" else {}))
    with pytest.raises(CheckpointError) as refusal:
        run_of(with_weights(tmp_path / "model", change, **config))
    assert re.search(words, str(refusal.value)), str(refusal.value)
    assert "\n" not in str(refusal.value)


HEADS = {
    "score.weight": {},
    "classifier.weight": {},
    "qa_outputs.bias": {},
    "v_head.summary.weight": {},
    "classes alone": {"architectures": ["LlamaForTokenClassification"]},
}


@pytest.mark.parametrize("name", HEADS)
def test_a_model_for_another_task_is_not_answered_with_tied_embeddings(name: str, tmp_path: Path) -> None:
    saved_model(tmp_path / "model")

    def another_head(weights: Weights) -> Weights:
        kept = {key: tensor for key, tensor in weights.items() if key != "lm_head.weight"}
        return kept | ({} if name == "classes alone" else {name: torch.ones(2, 16)})

    with pytest.raises(CheckpointError) as refusal:
        run_of(with_weights(tmp_path / "model", another_head, **HEADS[name]))
    assert "in place of a head for tokens (lm_head.weight). Use the language model that it was" in str(
        refusal.value
    )
    assert "tie_word_embeddings" not in str(refusal.value)


def test_a_tied_head_without_its_embedding_is_told(tmp_path: Path) -> None:
    saved_model(tmp_path / "model", tie_word_embeddings=True)
    change = renamed_one("model.embed_tokens.weight", "lm_head.weight")
    with pytest.raises(
        CheckpointError, match=r"holds the head .* without the embedding .* save_pretrained, which"
    ):
        run_of(with_weights(tmp_path / "model", change))


def renamed_one(before: str, after: str) -> Callable[[Weights], Weights]:
    return lambda weights: {after if name == before else name: tensor for name, tensor in weights.items()}


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_the_cause_is_that_of_the_family(family: Any, tmp_path: Path) -> None:
    saved_model(tmp_path / "model", family)
    change = more(model__layers__1__mlp__up_proj__bias=(32,))
    with pytest.raises(CheckpointError, match=rf'which no model of the type "{family}" has there'):
        run_of(with_weights(tmp_path / "model", change))


def test_a_head_of_its_own_wins_over_config_json_in_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_model(tmp_path / "model")
    model = with_weights(tmp_path / "model", lambda weights: weights, tie_word_embeddings=True)
    assert not run_of(model).model.tied_embeddings
    assert "says tie_word_embeddings, but its files hold a head (lm_head.weight) that differs" in caplog.text
    assert_as_transformers(model)


def test_a_head_that_is_the_embedding_is_the_embedding(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_model(tmp_path / "model", tie_word_embeddings=True)
    model = with_weights(
        tmp_path / "model", lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"].clone()}
    )
    assert run_of(model).model.tied_embeddings
    assert "tie_word_embeddings" not in caplog.text
    assert_as_transformers(model)


@pytest.mark.parametrize(
    "name",
    ["score.weight", "v_head.summary.weight", "classifier.dense.weight", "mtp.layers.0.weight",
     "model.mtp_layers.0.weight", "vision_tower.patch.weight", "visual.blocks.0.weight",
     "model.multi_modal_projector.weight", "medusa_head.0.weight", "qa_outputs.weight"],
)  # fmt: skip
def test_what_is_beside_the_language_model_is_left_out_with_a_line(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_model(tmp_path / "model")
    model = with_weights(tmp_path / "model", lambda weights: weights | {name: torch.ones(2, 16)})
    assert_as_transformers(model)
    assert f"beside the language model and are left out: {name}." in caplog.text


def test_what_a_model_computes_is_no_tensor_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_model(tmp_path / "model")
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(2) for layer in range(3)}
    with caplog.at_level(logging.WARNING):
        assert_as_transformers(with_weights(tmp_path / "model", lambda weights: weights | buffers))
    assert "left out" not in caplog.text
