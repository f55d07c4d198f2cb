"""What docs/models.md shows in tables and examples: the families, the stretches of positions, the cuts."""

from __future__ import annotations

import logging
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from bootstrap.export.model_config import FAMILIES as ARCHITECTURES
from node.model.stage import parameter_shapes, work_of
from protocol.run.cut import head_work, layer_work
from protocol.run.manifest import PRESETS, Manifest, load_preset
from protocol.run.model import ROPE_MAY, ROPE_NEEDS, Family, Model, Rope, RopeType
from tests.pretrained import transformers_config
from tests.swarm.micro import micro_manifest

PAGE = (Path(__file__).parent.parent.parent / "docs" / "models.md").read_text(encoding="utf-8")
SETTINGS: dict[str, dict[str, Any]] = {
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "sliding_window": {"sliding_window": 8},
    "full_layers": {"sliding_window": 8, "full_layers": 1},
}
OF_ROPE: dict[str, Any] = {
    "factor": 2.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "attention_factor": 1.5,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "truncate": False,
}


def rows(of: int) -> dict[str, list[str]]:
    """The page's `of`-th table by its first column."""
    tables = re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)
    cells = [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in tables[of].splitlines()[2:]]
    return {first: others for first, *others in cells}


FAMILIES = {first.split("`")[1]: others for first, others in rows(0).items()}


def is_taken(family: str, settings: dict[str, Any]) -> bool:
    contents = load_preset("tiny").model.model_dump() | {"family": family} | settings
    try:
        Model.model_validate(contents)
    except ValidationError:
        return False
    return True


def test_the_families_are_those_of_the_page() -> None:
    assert tuple(FAMILIES) == get_args(Family)
    assert {first for first in rows(0) if "(default)" in first} == {
        f"`{load_preset('tiny').model.family}` (default)"
    }
    assert "family" not in load_preset("tiny").model.model_fields_set


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_what_the_page_says_and_no_more(family: Family) -> None:
    architecture, has = FAMILIES[family]
    assert ARCHITECTURES[family] == architecture
    taken = {name for name, settings in SETTINGS.items() if is_taken(family, settings)}
    assert taken == set(re.findall(r"`(\w+)`", has))
    names = " ".join(parameter_shapes(micro_manifest(model__family=family), 0))
    assert all(f"{which}_proj.bias" in names for which in "qkv") is (
        "biases of queries, keys and values" in has
    )
    assert ("q_norm" in names and "k_norm" in names) is ("norms of queries and keys" in has)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_grouped_queries_any_even_heads_and_tied_embeddings(family: str, heads: int) -> None:
    for size in (0, 2, 6, 30):
        for is_tied in (False, True):
            settings = {"heads": 4, "kv_heads": heads, "head_dim": size, "tied_embeddings": is_tied}
            assert is_taken(family, settings)
    assert not is_taken(family, {"head_dim": 7})


@pytest.mark.parametrize("kind", get_args(RopeType))
def test_a_stretch_takes_the_settings_that_transformers_has_for_it(
    kind: RopeType, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each needs some and may have others: with those transformers has nothing to say, with one more it warns."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")  # whatever was set before

    def transformers_takes(settings: dict[str, Any]) -> bool:
        caplog.clear()
        plain = micro_manifest(model__max_positions=64)
        rope = Rope.model_construct(type=kind, **settings)
        model = plain.model.model_copy(update={"rope": rope})
        try:
            transformers_config(plain.model_copy(update={"model": model}))
        except (KeyError, TypeError):
            return False
        return not any("keys in `rope_parameters`" in message for message in caplog.messages)

    def is_taken_here(settings: dict[str, Any]) -> bool:
        try:
            Rope.model_validate({"type": kind, **settings})
        except ValidationError:
            return False
        return True

    needed = ROPE_NEEDS[kind]
    taken = {name: OF_ROPE[name] for name in (*needed, *ROPE_MAY.get(kind, ()))}
    assert is_taken_here(taken)
    assert transformers_takes(taken)
    for name in OF_ROPE.keys() - taken.keys():
        assert not is_taken_here(taken | {name: OF_ROPE[name]})
        assert not transformers_takes(taken | {name: OF_ROPE[name]})
    for name in needed:
        rest = {other: value for other, value in taken.items() if other != name}
        assert not is_taken_here(rest)
        # which it guesses, from the positions that the model has
        assert transformers_takes(rest) is (name == "original_max_position_embeddings")


def test_the_example_of_stretched_positions_is_taken() -> None:
    [example] = re.findall(r"(?:^    .*\n)+", PAGE[PAGE.index("    [model.rope]") :], re.MULTILINE)[:1]
    rope = tomllib.loads(re.sub(r"(?m)^    ", "", example))["model"]["rope"]
    assert Rope.model_validate(rope).type == "llama3"
    others = re.findall(r"# or (.*)", example)[0].split(", ")
    assert {"default", rope["type"], *others} == set(get_args(RopeType))


def millions(multiplications: int) -> str:
    """As the page rounds them."""
    return f"{multiplications / 1e6:.{2 if multiplications < 1e6 else 0}f}"


def evenly(manifest: Manifest) -> int:
    """Work of the slowest stage when each has as many layers."""
    layers = manifest.model.layers // manifest.stages
    assert layers * manifest.stages == manifest.model.layers
    work = layers * layer_work(manifest.model, manifest.data.sequence_tokens)
    return work + head_work(manifest.model)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_presets_are_cut_as_the_page_shows(preset: str) -> None:
    manifest = load_preset(preset)
    stages = range(manifest.stages)
    assert rows(1)[preset] == [
        ", ".join(str(len(manifest.layers_of(stage))) for stage in stages),
        millions(max(work_of(manifest, stage) for stage in stages)),
        millions(evenly(manifest)),
    ]
