"""`noloco simulate learning`: every combination is tried once, kept, and not tried again."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bootstrap.lab.simulation.learning import LearningResult
from bootstrap.lab.simulation.pulse import Pulse
from bootstrap.lab.simulation.simulate_cli import app, changes, wires
from bootstrap.lab.simulation.study import (
    at_same_bytes,
    bytes_table,
    one_setting,
    points_of,
    read_outcomes,
    rows,
    run_study,
    tables_of,
)
from protocol.errors import DataError
from protocol.run.manifest import load_preset

SHORT = [
    "learning",
    "--steps",
    "6",
    "-k",
    "2",
    "--replicas",
    "2",
    "--stages",
    "1",
    "--seeds",
    "0",
    "--jobs",
    "1",
]


def short(**changes: Any) -> Any:
    settings: dict[str, Any] = {
        "stages": 1,
        "replicas": 2,
        "inner_steps": 2,
        "validation_sequences": 8,
        **changes,
    }
    return one_setting(load_preset("tiny"), 6, 1, 1, **settings)


@pytest.mark.long
def test_methods_side_by_side_as_json_and_as_a_picture(tmp_path: Path) -> None:
    plot = tmp_path / "learning.svg"
    result = CliRunner().invoke(
        app,
        [*SHORT, "--method", "noloco,all-reduce", "--set", "wire.gossip=fp32", "--plot", str(plot), "--json"],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout[result.stdout.index("{") :])
    noloco, all_reduce = found["results"]
    assert (noloco["method"], all_reduce["method"]) == ("noloco", "all-reduce")
    assert 4.5 < noloco["loss"] < 6
    assert all_reduce["spread"] == 0
    assert (
        all_reduce["share"] == 1
    )  # of what a ring of two sends in bf16: as much as z in float32 every second step
    assert noloco["share"] == pytest.approx(
        noloco["bytes_per_token"] / all_reduce["bytes_per_token"], abs=1e-4
    )
    # a round without a partner sends nothing; three closing rounds double the three of this run
    assert 0.5 < noloco["share"] < 2.2
    assert plot.read_text(encoding="utf-8").startswith("<?xml")


@pytest.mark.long
def test_a_study_goes_on_where_it_stopped_and_repeats_itself(tmp_path: Path) -> None:
    file, told = tmp_path / "study.jsonl", []
    first = run_study([short()], file, 1, lambda outcome, done, of: told.append((done, of)))
    both = run_study([short(), short(seed=1)], file, 1, lambda outcome, done, of: told.append((done, of)))
    assert told == [(1, 1), (2, 2)]  # the first was not run again
    assert both[0] == first[0] == read_outcomes(file)[0]
    again = run_study([short()], None, 1, lambda *_: None)[0]
    assert (again.losses, again.spread) == (first[0].losses, first[0].spread)
    (row,) = rows(both)
    assert row["seeds"] == 2
    assert row["loss_deviation"] != 0


@pytest.mark.long
def test_the_codecs_between_stages_are_facts_and_an_outcome_is_found_by_its_setting(tmp_path: Path) -> None:
    file = tmp_path / "study.jsonl"
    told: list[int] = []
    run_study([short()], file, 1, lambda outcome, done, of: told.append(done))
    int8 = short(wire={"activations": "int8", "gradients": "eden4"}, stages=2)
    plain = short(wire={"activations": "fp32", "gradients": "fp32"})  # which the preset has anyway
    outcomes = run_study([plain, int8], file, 1, lambda outcome, done, of: told.append(done))
    assert told == [1, 2]
    assert [(o.setting["activations"], o.setting["gradients"]) for o in outcomes] == [
        ("fp32", "fp32"),
        ("int8", "eden4"),
    ]


@pytest.mark.long
def test_settings_of_the_manifest_make_rows_with_intervals_and_differences_seed_by_seed() -> None:
    given = ["--seeds", "0,1", "--set", "inner.optimizer=adamw,muon", "--set", "outer.clip=1.5", "--json"]
    result = CliRunner().invoke(app, [*SHORT, *given], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    plain, muon = json.loads(result.stdout[result.stdout.index("{") :])["results"]
    assert (plain["inner.optimizer"], muon["inner.optimizer"]) == ("adamw", "muon")
    assert "outer.clip" not in plain  # all have it
    one, other = plain["loss_by_seed"].values()
    assert plain["loss_interval"] == pytest.approx(12.706 * abs(one - other) / 2, abs=2e-3)
    assert plain["difference"] == 0
    apart = [muon["loss_by_seed"][seed] - plain["loss_by_seed"][seed] for seed in ("0", "1")]
    assert muon["difference"] == pytest.approx(sum(apart) / 2, abs=2e-4)
    assert muon["difference_interval"] == pytest.approx(12.706 * abs(apart[0] - apart[1]) / 2, abs=2e-3)


def test_a_seed_draws_the_first_weights_too() -> None:
    assert short(seed=0).manifest.model.seed == load_preset("tiny").model.seed
    assert short(seed=1).manifest.model.seed != short(seed=0).manifest.model.seed


def test_any_setting_can_be_listed_and_combined() -> None:
    assert changes(["outer.clip=0,1.5", "inner.optimizer=muon"]) == [
        {"outer.clip": 0, "inner.optimizer": "muon"},
        {"outer.clip": 1.5, "inner.optimizer": "muon"},
    ]
    made = short(chosen={"outer.clip": 1.5, "model.layers": 3, "routing": "fixed"})
    assert (made.manifest.outer.clip, made.manifest.model.layers) == (1.5, 3)
    assert made.facts()["model.layers"] == 3
    assert made.key != short(chosen={"outer.clip": 1.5}).key


def test_a_list_of_codecs_gives_a_setting_for_each() -> None:
    assert wires("--codecs", "bf16,int8/eden4") == [
        {"activations": "bf16", "gradients": "bf16"},
        {"activations": "int8", "gradients": "eden4"},
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--method", "adam"], "choose from"),
        (["--replicas", "two"], "whole numbers"),
        (["--gamma", "1.6"], "stable range"),
        (["--stages", "9"], "exceeds model.layers"),
        (["--seeds", ""], "--seeds"),
        (["--codecs", "int8/int32"], "choose from"),
        (["--set", "outer.clap=1"], "outer.clap"),
        (["--set", "outer=1"], "outer"),
        (["--set", "outer.clip"], "outer.clip=1.5"),
    ],
)
def test_a_wrong_option_gets_one_line(options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, [*SHORT, *options])
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text('{"a": 1}\n', encoding="utf-8")
    with pytest.raises(DataError, match="line 1"):
        run_study([short()], file, 1, lambda *_: None)


@pytest.mark.parametrize("other", [{"method": "diloco"}, {"method": "local"}, {"overlap": "phi-early"}])
def test_what_cannot_use_the_presets_codec_for_pairs_has_int8(other: dict[str, str]) -> None:
    assert short().manifest.wire.gossip == "mod3"
    assert short(**other).manifest.wire.gossip == "int8"
    assert short(**other, chosen={"wire.gossip": "bf16"}).manifest.wire.gossip == "bf16"


def invented(k: int, seed: int) -> LearningResult:
    """What a study of long names, of twelve seeds, looks like."""
    facts = {
        "method": "noloco",
        "k": k,
        "inner.optimizer": "muon" if k > 4 else "adamw",
        "wire.gossip": f"mod{k % 3}",
        "seed": seed,
    }
    return LearningResult(
        "", facts, 1.234 + k / 10 + seed / 1_000, loss_of_mean=1.2, spread=1.7e-3, share=0.0123, rounds=1_234.0,
        bytes_per_token=12_345.6, paired=0.98, blocked=0.001, tokens=1_000_000,
    )  # fmt: skip


@pytest.mark.parametrize("seeds", [1, 12])
def test_the_tables_of_a_study_fit_eighty_columns_with_every_number(seeds: int) -> None:
    shown = io.StringIO()
    for table in tables_of([invented(k, seed) for k in (4, 12, 25) for seed in range(seeds)]):
        Console(file=shown, width=80, markup=False).print(table)
    text = shown.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for k in (4, 12, 25):
        losses = [1.234 + k / 10 + seed / 1_000 for seed in range(seeds)]
        for number in (f"{sum(losses) / seeds:.3f}", *([f"{loss:.3f}" for loss in losses] * (seeds > 1))):
            assert number in text
    assert text.count("+0.800") == text.count("+2.100") == 1
    assert "k 12, optimizer muon" in text


def test_settings_are_compared_where_they_had_sent_as_many_bytes_and_plots_end_at_the_table() -> None:
    frugal, lavish, silent = (invented(k, 0) for k in (4, 12, 25))
    frugal.bytes_per_replica, lavish.bytes_per_replica = 1_000.0, 4_000.0
    lavish.curve = [(200_000, 4.0, 0.0), (300_000, 3.0, 0.0), (1_000_000, 9.0, 0.0)]
    first, second, third = at_same_bytes([frugal, lavish, silent])
    assert (first["bytes"], first["loss"], first["tokens_share"]) == (1_000, round(frugal.loss, 4), 1.0)
    assert (second["loss"], second["tokens_share"]) == (3.5, 0.25)
    assert (third["loss"], third["tokens_share"]) == (None, None)
    assert points_of(lavish)[-2:] == [(300_000, 3.0, 0.0), (1_000_000, lavish.loss, lavish.spread)]
    shown = io.StringIO()
    Console(file=shown, width=80, markup=False).print(bytes_table([frugal, lavish, silent]))
    assert "loss at 1000 B" in shown.getvalue()
    assert max(map(len, shown.getvalue().splitlines())) <= 80
    lavish.bytes_per_replica = 40_000.0  # so many are sent before the curve begins
    assert at_same_bytes([frugal, lavish])[1]["loss"] is None


def test_how_far_a_run_is_is_told_each_ten_seconds() -> None:
    now, told = [0.0], list[str]()
    facts = {"method": "noloco", "replicas": 4, "stages": 2, "k": 12, "seed": 0}
    pulse = Pulse(facts, 1_000, told.append, lambda: now[0])
    for second in range(31):
        now[0] = float(second)
        pulse.loss = 2.5 if second > 10 else None
        pulse.look(20 * second)
    assert told == [
        "noloco 4 × 2 k=12 seed 0: step 200 of 1,000, about 40 s left",
        "noloco 4 × 2 k=12 seed 0: step 400 of 1,000, loss 2.500, about 30 s left",
        "noloco 4 × 2 k=12 seed 0: step 600 of 1,000, loss 2.500, about 20 s left",
    ]
