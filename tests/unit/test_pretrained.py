"""Starting from a Hugging Face checkpoint: the same model, and one sentence for each thing that may be wrong."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors import safe_open

from bootstrap.creating.choosing import RunOptions, model_of
from bootstrap.creating.run import found
from bootstrap.export.checkpoint import save_json
from bootstrap.export.model_config import config_of
from node.model.flat import layout
from node.model.passes import evaluate_through
from node.model.pretrained import Pretrained, load_stage
from node.model.replica import Replica
from node.model.stage import parameter_shapes
from protocol.errors import CheckpointError, ManifestError
from protocol.records.identity import Identity
from protocol.run.manifest import Manifest, preset_text
from protocol.run.model import Family
from protocol.run.signed_manifest import SignedManifest
from tests.pretrained import saved_model, transformers_config
from tests.swarm.micro import micro_manifest
from tests.unit.whole_models import VARIANTS

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
KINDS: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied llama": ("llama", {"tie_word_embeddings": True}),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3, "head_dim": 6}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 9, "head_dim": 8}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2 with a window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
}


def run_of(directory: Path, stages: int = 2) -> Manifest:
    """A run that starts from the checkpoint there, founded with the tiny preset's other settings."""
    file = directory.parent / "run.toml"
    text = preset_text("tiny").replace("stages = 2", f"stages = {stages}")
    before, _, rest = text.partition("[model]")
    file.write_text(before + rest[rest.index("[data]") :], encoding="utf-8")
    return RunOptions(file=file, from_checkpoint=str(directory)).resolved()[0]


class Opened:
    """Stands for `safe_open` and notes the tensors that are read."""

    def __init__(self) -> None:
        self.read: list[str] = []

    @contextmanager
    def __call__(self, file: Path, framework: str) -> Iterator[Any]:
        with safe_open(file, framework=framework) as opened:
            yield SimpleNamespace(
                keys=opened.keys, get_slice=opened.get_slice, get_tensor=partial(self._get, opened)
            )

    def _get(self, opened: Any, name: str) -> torch.Tensor:
        self.read.append(name)
        tensor: torch.Tensor = opened.get_tensor(name)
        return tensor


def replicas_of(directory: Path, manifest: Manifest) -> list[Replica]:
    replicas = [Replica(manifest, stage) for stage in range(manifest.stages)]
    for stage, replica in enumerate(replicas):
        load_stage(Pretrained(str(directory)), manifest, stage, replica)
    return replicas


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_starts_with_the_very_model_that_transformers_saved(
    kind: str, stages: int, tmp_path: Path
) -> None:
    family, settings = KINDS[kind]
    whole = saved_model(tmp_path / "model", family, **settings)
    manifest = run_of(tmp_path / "model", stages)
    tokens = torch.randint(0, 256, (2, 40))
    with torch.no_grad():
        expected = whole(tokens).logits
    passes = [replica.passes for replica in replicas_of(tmp_path / "model", manifest)]
    found_logits = evaluate_through(passes, tokens)
    assert torch.allclose(found_logits, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_several_files_becomes_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = saved_model(tmp_path / "model", dtype=dtype, max_shard_size="8KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    replicas = replicas_of(tmp_path / "model", run_of(tmp_path / "model"))
    named = {name: p.float() for name, p in whole.named_parameters()}
    for replica in replicas:
        assert replica.phi.dtype == torch.float32
        for place in replica.flat.slices:
            assert torch.equal(place.of(replica.phi), named[place.name])
            assert torch.equal(place.of(replica.flat.values), named[place.name])


def test_the_same_checkpoint_makes_the_same_run_whatever_its_files(tmp_path: Path) -> None:
    saved_model(tmp_path / "one" / "model")
    saved_model(tmp_path / "several" / "model", max_shard_size="8KB")
    assert run_of(tmp_path / "one" / "model") == run_of(tmp_path / "several" / "model")


def test_a_founded_run_is_taken_up_again_with_the_same_checkpoint_and_no_other(tmp_path: Path) -> None:
    saved_model(tmp_path / "model")
    first = found(tmp_path / "run", run_of(tmp_path / "model"))
    again = found(tmp_path / "run", run_of(tmp_path / "model"))
    assert (again.signed.run_id, again.is_new) == (first.signed.run_id, False)
    assert first.signed.manifest.start is not None
    assert first.signed.manifest.start.name == "model"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_config_of_an_export_makes_the_same_model(variant: str, is_tied: bool, tmp_path: Path) -> None:
    own = {"layers": 4, "max_positions": 64, "tied_embeddings": is_tied, **VARIANTS[variant]}
    manifest = micro_manifest(**{f"model__{name}": value for name, value in own.items()})
    save_json(config_of(manifest), tmp_path / "config.json")
    again = manifest.model_copy(update={"model": model_of(Pretrained(str(tmp_path)))})
    assert transformers_config(again).to_dict() == transformers_config(manifest).to_dict()


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "8KB"}], ids=["one file", "several"])
def test_all_weights_are_read_once_and_each_stage_has_their_digest(
    shards: dict[str, Any], is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = saved_model(tmp_path / "model", tie_word_embeddings=is_tied, **shards)
    opened = Opened()
    monkeypatch.setattr("node.model.pretrained.safe_open", opened)
    manifest = run_of(tmp_path / "model")
    named = dict(whole.named_parameters())
    assert sorted(opened.read) == sorted(named)
    assert manifest.start is not None
    for stage, digest in enumerate(manifest.start.digests):
        flat = torch.cat([named[place.name].flatten() for place in layout(parameter_shapes(manifest, stage))])
        assert digest == hashlib.sha256(flat.detach().numpy().astype("<f4").tobytes()).hexdigest()


def test_the_signature_covers_the_digests(tmp_path: Path) -> None:
    saved_model(tmp_path / "model")
    manifest, owner = run_of(tmp_path / "model"), Identity.from_seed("owner")
    signed = SignedManifest.sign(manifest, owner).to_bytes()
    assert SignedManifest.from_bytes(signed).manifest.start == manifest.start
    assert manifest.start is not None
    for digest in manifest.start.digests:
        altered = signed.replace(digest.encode(), digest[::-1].encode())
        assert altered != signed
        with pytest.raises(ManifestError, match="signature does not match"):
            SignedManifest.from_bytes(altered)


def test_a_stage_reads_its_own_tensors_alone_and_of_the_hub_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "somebody--model"
    saved_model(model, max_shard_size="8KB")
    manifest = run_of(model)
    places = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    for stage in range(2):
        own = set(parameter_shapes(manifest, stage))
        files, opened, fetched = {places[name] for name in own}, Opened(), list[str]()
        assert files < set(places.values())

        def download(source: str, name: str, fetched: list[str] = fetched) -> str:
            if not (model / name).exists():
                raise EntryNotFoundError(name)
            fetched.append(name)
            return str(model / name)

        monkeypatch.setattr("node.model.pretrained.safe_open", opened)
        monkeypatch.setattr("node.model.pretrained.hf_hub_download", download)
        load_stage(Pretrained("somebody/model"), manifest, stage, Replica(manifest, stage))
        assert set(opened.read) == own
        assert {name for name in fetched if name.endswith(".safetensors")} == files


def test_another_checkpoint_of_the_same_shapes_is_not_taken(tmp_path: Path) -> None:
    saved_model(tmp_path / "model")
    manifest = run_of(tmp_path / "model")
    saved_model(tmp_path / "model", initializer_range=0.1)
    with pytest.raises(CheckpointError, match="is not the checkpoint that run 'tiny' started from"):
        replicas_of(tmp_path / "model", manifest)
