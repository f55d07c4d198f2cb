"""The manifest: what signing guarantees, and that each impossible setting is refused by its name."""

from __future__ import annotations

import copy
import hashlib
import re
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ManifestError
from protocol.records.identity import Identity
from protocol.run.manifest import PRESETS, Manifest, load_preset, load_toml, manifest_from, preset_text
from protocol.run.signed_manifest import MAX_MANIFEST_BYTES, SignedManifest, canonical_bytes
from tests.published import published_text, published_tiny

OWNER = Identity.from_seed("owner of the run")
TINY = published_tiny()
SIGNED = SignedManifest.sign(TINY, OWNER)
RAW = SIGNED.to_bytes()


def contents(**changes: Any) -> dict[str, Any]:
    """The tiny preset as published, with settings changed: section__field=value, or field=value at the top."""
    settings: dict[str, Any] = copy.deepcopy(TINY.model_dump())
    for place, value in changes.items():
        *sections, name = place.split("__")
        section = settings[sections[0]] if sections else settings
        section[name] = value
    return settings


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_loads_and_survives_the_wire(name: str) -> None:
    signed = SignedManifest.sign(load_preset(name), OWNER)
    received = SignedManifest.from_bytes(signed.to_bytes())
    assert received.manifest == load_preset(name)
    assert received.run_id == signed.run_id
    assert received.to_bytes() == signed.to_bytes()


def test_the_run_is_named_by_the_hash_of_its_owners_key() -> None:
    assert SIGNED.run_id == hashlib.sha256(OWNER.public_key).hexdigest()[:32]
    assert SignedManifest.sign(load_preset("llama-125m"), OWNER).run_id == SIGNED.run_id
    assert SignedManifest.sign(TINY, Identity.from_seed("another owner")).run_id != SIGNED.run_id


def test_an_unknown_preset_names_those_there_are() -> None:
    with pytest.raises(ManifestError, match=", ".join(map(re.escape, PRESETS))):
        load_preset("llama-70b")


def test_the_same_settings_give_the_same_bytes_in_whatever_order_they_come() -> None:
    def reversed_order(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: reversed_order(value[key]) for key in reversed(list(value))}
        return value

    assert canonical_bytes(manifest_from(reversed_order(contents()))) == canonical_bytes(TINY)
    assert canonical_bytes(Manifest.model_validate(msgpack.unpackb(canonical_bytes(TINY)))) == (
        canonical_bytes(TINY)
    )


# --- what a signature guarantees ----------------------------------------------------------------


@given(place=st.integers(0, len(RAW) - 1), flip=st.integers(1, 255))
def test_no_byte_can_be_altered(place: int, flip: int) -> None:
    altered = bytearray(RAW)
    altered[place] ^= flip
    with pytest.raises(ManifestError):
        SignedManifest.from_bytes(bytes(altered))


@given(garbage=st.binary(max_size=300))
def test_garbage_is_refused_as_a_manifest_and_nothing_worse(garbage: bytes) -> None:
    with pytest.raises(ManifestError):
        SignedManifest.from_bytes(garbage)


@given(length=st.integers(0, len(RAW) - 1))
def test_a_cut_manifest_is_refused(length: int) -> None:
    with pytest.raises(ManifestError):
        SignedManifest.from_bytes(RAW[:length])


def test_another_key_cannot_sign_for_the_run() -> None:
    forger = Identity.from_seed("forger")
    _, body, signature = msgpack.unpackb(SignedManifest.sign(TINY, forger).to_bytes())
    with pytest.raises(ManifestError, match="signature does not match"):
        SignedManifest.from_bytes(msgpack.packb([OWNER.public_key, body, signature]))


def test_a_signature_made_for_something_else_does_not_count() -> None:
    body = canonical_bytes(TINY)
    with pytest.raises(ManifestError, match="signature does not match"):
        SignedManifest.from_bytes(msgpack.packb([OWNER.public_key, body, OWNER.sign(body)]))


def test_an_oversized_manifest_is_not_even_parsed() -> None:
    with pytest.raises(ManifestError, match=f"at most {MAX_MANIFEST_BYTES:,}"):
        SignedManifest.from_bytes(bytes(MAX_MANIFEST_BYTES + 1))


@pytest.mark.parametrize("body", [b"\xc1", msgpack.packb([1, 2]), msgpack.packb("words"), b""])
def test_well_signed_nonsense_is_refused(body: bytes) -> None:
    signature = OWNER.sign(b"noloco-manifest-1:" + body)
    with pytest.raises(ManifestError):
        SignedManifest.from_bytes(msgpack.packb([OWNER.public_key, body, signature]))


def test_a_well_signed_but_impossible_manifest_is_refused() -> None:
    body = msgpack.packb(contents(stages=5))
    signature = OWNER.sign(b"noloco-manifest-1:" + body)
    with pytest.raises(ManifestError, match="stages 5 exceeds"):
        SignedManifest.from_bytes(msgpack.packb([OWNER.public_key, body, signature]))


# --- impossible settings ------------------------------------------------------------------------

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"outer__gamma": 1.6}, ["outer.gamma 1.6", "1.500"]),
        ({"outer__gamma": 0.0}, ["outer.gamma", "between 0 and 1.500"]),
        ({"outer__gamma": 0.7, "outer__alpha": 0.9}, ["outer.gamma 0.7", "0.380"]),
        ({"wire__gossip": "mod3", "outer__gamma": 1.2}, ["outer.gamma 1.2", "mod3", "1.029", "more bits"]),
        ({"wire__gossip": "mod2"}, ["outer.gamma 0.7", "mod2", "alpha 0.5"]),
        # which ended at 5 nats, and at 12 with shorter rounds
        ({"wire__gossip": "mod2", "outer__alpha": 0.0, "outer__gamma": 0.85}, ["outer.gamma 0.85", "0.798"]),
        ({"wire__gossip": "mod3", "outer__overlap": "phi-early"}, ["mod3", 'outer.overlap to "none"']),
        ({"wire__gossip": "mod4", "outer__method": "diloco"}, ["mod4", "outer.method", "int8"]),
        ({"wire__progress": "mod4"}, ["wire.progress"]),
        ({"outer__alpha": 1.0}, ["outer.alpha"]),
        ({"outer__gamma": NAN}, ["outer.gamma"]),
        ({"outer__beta": 0.0}, ["outer.beta"]),
        ({"outer__inner_steps": 0}, ["outer.inner_steps"]),
        ({"outer__window": 1.0}, ["outer.window"]),
        ({"stages": 5}, ["stages 5", "model.layers 4"]),
        ({"stages": 0}, ["stages"]),
        ({"model__heads": 3}, ["model.hidden_size 64", "model.heads 3"]),
        ({"model__hidden_size": 20}, ["model.hidden_size 20", "even multiple"]),  # rotary needs an even head
        ({"model__kv_heads": 3}, ["model.heads 4", "model.kv_heads 3"]),
        ({"model__vocab_size": 255}, ["model.vocab_size 255", "256"]),
        ({"model__layers": 10**6}, ["model.layers"]),
        ({"model__rope_theta": INFINITY}, ["model.rope_theta"]),
        ({"model__init_std": -0.1}, ["model.init_std"]),
        ({"model__family": "gpt2"}, ["model.family"]),
        ({"model__head_dim": 7}, ["model.head_dim 7", "even"]),
        ({"model__family": "mistral", "model__attention_bias": True}, ["model.attention_bias", "mistral"]),
        ({"model__family": "qwen3", "model__mlp_bias": True}, ["model.mlp_bias", "qwen3"]),
        ({"model__sliding_window": 64}, ["model.sliding_window", "llama"]),
        ({"model__family": "qwen2", "model__full_layers": 1}, ["model.full_layers"]),
        ({"model__rope": {"type": "linear"}}, ["model.rope.factor is missing", "linear"]),
        ({"model__rope": {"type": "linear", "factor": 2.0, "beta_fast": 1.0}}, ["model.rope.beta_fast"]),
        ({"model__rope": {"type": "longrope"}}, ["model.rope.type"]),
        ({"model__rope": {"type": "linear", "factor": 1e9}}, ["model.rope.factor"]),
        ({"model__rope": {"type": "linear", "factor": NAN}}, ["model.rope.factor"]),
        ({"model__tied_embeddings": True, "inner__staleness": 1}, ["inner.staleness 1", "tied_embeddings"]),
        ({"model__seed": -1}, ["model.seed"]),
        ({"inner__warmup_steps": 10_000}, ["inner.warmup_steps 10000", "inner.total_steps 10000"]),
        ({"inner__min_learning_rate": 1.0}, ["inner.min_learning_rate", "inner.learning_rate"]),
        ({"inner__learning_rate": NAN}, ["inner.learning_rate"]),
        ({"inner__learning_rate": INFINITY}, ["inner.learning_rate"]),
        ({"inner__weight_decay": INFINITY}, ["inner.weight_decay"]),
        ({"inner__beta2": 1.0}, ["inner.beta2"]),
        ({"inner__microbatches": 0}, ["inner.microbatches"]),
        ({"inner__sequences": 2.5}, ["inner.sequences"]),
        ({"data__held_out": 0.5}, ["data.held_out"]),
        ({"data__source": "/etc/passwd"}, ["data.source"]),
        ({"data__sequence_tokens": 1}, ["data.sequence_tokens"]),
        ({"wire__gossip": "pickle"}, ["wire.gossip"]),
        ({"wire__gossip": "eden4"}, ["wire.gossip"]),
        ({"wire__activations": "int32"}, ["wire.activations"]),
        ({"limits__gossip_deadline": NAN}, ["limits.gossip_deadline"]),
        ({"limits__clock_skew": 10.0}, ["limits.clock_skew"]),
        ({"limits__record_lifetime": 1.0}, ["limits.record_lifetime"]),
        ({"protocol": 2}, ["protocol"]),
        ({"name": "../../etc"}, ["name"]),
        ({"surprise": 1}, ["surprise"]),
        ({"outer__surprise": 1}, ["outer.surprise"]),
        ({"outer__overlap": "late"}, ["outer.overlap", '"late" was removed', "phi-early"]),
        ({"outer__drift_control": False}, ["outer.drift_control", "removed", "take the line out"]),
    ],
)
def test_an_impossible_setting_is_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ManifestError) as refusal:
        manifest_from(contents(**changes))
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_every_bad_setting_is_listed_at_once() -> None:
    with pytest.raises(ManifestError) as refusal:
        manifest_from(contents(stages=0, inner__beta1=2.0, wire__gossip="zip"))
    assert all(place in str(refusal.value) for place in ("stages", "inner.beta1", "wire.gossip"))


# --- what people write --------------------------------------------------------------------------


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_preset_copied_to_a_file_is_the_same_manifest(tmp_path: Path) -> None:
    assert load_toml(written(tmp_path, preset_text("tiny"))) == load_preset("tiny")


def test_broken_toml_names_the_file_and_the_line(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"run\.toml.*line 2"):
        load_toml(written(tmp_path, 'name = "a"\nstages = = 2\n'))


def test_a_bad_setting_in_a_file_names_the_file_and_the_setting(tmp_path: Path) -> None:
    text = published_text().replace("gamma = 0.7", "gamma = 2.0")
    with pytest.raises(ManifestError, match=r"(?s)run\.toml.*outer\.gamma 2.*1\.500"):
        load_toml(written(tmp_path, text))


def test_a_missing_file_is_told_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"nowhere\.toml"):
        load_toml(tmp_path / "nowhere.toml")


def test_a_binary_file_is_not_a_manifest(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ManifestError, match=r"weights\.bin"):
        load_toml(path)


# --- slices -------------------------------------------------------------------------------------


@given(layers=st.integers(1, 200), data=st.data())
def test_the_stages_cover_all_layers_one_after_another(layers: int, data: Any) -> None:
    stages = data.draw(st.integers(1, layers))
    manifest = manifest_from(contents(model__layers=layers, stages=stages))
    slices = [manifest.layers_of(stage) for stage in range(stages)]
    assert [layer for layers_of_stage in slices for layer in layers_of_stage] == list(range(layers))
    assert all(slices)
