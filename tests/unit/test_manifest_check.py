"""`noloco manifest check`: numbers that a founder can rely on, and one line for each thing that is wrong."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from bootstrap.checking.front import read_points
from bootstrap.checking.manifest_cli import app
from bootstrap.checking.report import AssumedLinks, Report, report_on
from bootstrap.checking.tables import sentences
from node.machine.limits import size
from node.model.resources import memory_needed
from node.model.stage import parameter_count
from protocol.codecs.codec import nbytes_of
from protocol.errors import ManifestError
from protocol.records.identity import Identity
from protocol.run.manifest import PRESETS, Manifest, load_preset, load_toml, manifest_from, preset_text
from protocol.run.signed_manifest import SignedManifest
from tests.published import published_text, published_tiny

TINY = published_tiny()
LINKS = AssumedLinks(mbit=100.0, latency=0.05)
TINY_STAGE_0 = parameter_count(TINY, 0)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["check", *arguments])


def told(*arguments: str) -> str:
    """What is printed, as one line: terminals wrap where they must."""
    answer = run(*arguments)
    assert answer.exit_code == 0, answer.output
    return " ".join(answer.stdout.split())


def changed(**settings: Any) -> Manifest:
    """The tiny preset with the published averaging and changes: section__field=value."""
    contents = TINY.model_dump()
    for place, value in settings.items():
        section, name = place.split("__")
        contents[section][name] = value
    return manifest_from(contents)


def report(replicas: int = 8, links: AssumedLinks = LINKS, **settings: Any) -> Report:
    return report_on(changed(**settings), replicas, links)


# --- what is shown ------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_passes(preset: str) -> None:
    words = told("--preset", preset)
    assert re.match(rf"Fits .* Mbit/s up: about .* tokens\. {preset}: ", words)
    assert "γ 1 is at 65% of its bound 1.53" in words
    assert "8 replicas settle 1.153 times s apart" in words


def test_a_file_is_checked_as_its_preset(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(preset_text("tiny"), encoding="utf-8")
    assert run(str(file)).stdout == run("--preset", "tiny").stdout


def test_the_signed_manifest_of_a_run_is_read_and_no_text_is_never_to_be_saved_as_text(
    tmp_path: Path,
) -> None:
    file = tmp_path / "manifest.noloco"
    signed = SignedManifest.sign(load_preset("tiny"), Identity.from_seed("owner")).to_bytes()
    file.write_bytes(signed)
    assert told(str(file)) == told("--preset", "tiny")
    with pytest.raises(ManifestError, match=r"is a run's signed manifest, not TOML: leave it as it is\."):
        load_toml(file)
    file.write_bytes(signed[:-9] + bytes(9))
    answer = run(str(file))
    assert answer.exit_code == 2
    assert "The manifest's signature does not match" in answer.stderr
    for binary in (b"\x89PNG\r\n\x1a\n\0\0", bytes(range(256))):
        file.write_bytes(binary)
        assert "is no text. Check the path" in run(str(file)).stderr
    for text in ("name = 'größer'".encode("latin-1"), "name = 'x'".encode("utf-16")):
        file.write_bytes(text)
        assert "save it as UTF-8" in run(str(file)).stderr


def test_layers_parameters_and_memory_of_each_stage_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    text = published_text().replace("stages = 2", "stages = 3").replace("layers = 4", "layers = 7")
    file.write_text(text, encoding="utf-8")
    manifest = load_toml(file)
    rows = [line.split() for line in run(str(file)).stdout.splitlines()]
    for stage in range(3):
        layers, parameters = len(manifest.layers_of(stage)), parameter_count(manifest, stage)
        memory = size(memory_needed(manifest, stage)).split()
        assert [str(stage), str(layers), f"{parameters:,}", *memory] in [row[:5] for row in rows]


def test_json_holds_the_same_numbers(tmp_path: Path) -> None:
    contents = json.loads(run(str(written(tmp_path)), "--json", "--replicas", "4").stdout)
    assert contents["ok"] is True
    assert contents["parameters"] == 295_488
    assert [s["memory"] for s in contents["stages"]] == [memory_needed(TINY, stage) for stage in (0, 1)]
    assert contents["stability"]["spread"] == pytest.approx(0.655, abs=5e-4)


def test_the_windows_of_text_are_told() -> None:
    assert "Stage 0 holds 64.5 MiB of text beside it, to shuffle" in told("--preset", "tiny")


def test_slower_links_mean_longer_waits(tmp_path: Path) -> None:
    file = written(tmp_path)
    assert "0.11 s a round at 85 Mbit/s and 50 ms" in told(str(file), "--mbit", "85")
    assert "0.55 s a round at 100 Mbit/s and 500 ms" in told(str(file), "--latency-ms", "500")


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("noloco", "with one random partner: one state (fp32) out and one in"),
        ("average", "with one random partner"),
        ("diloco", "over all replicas: 1.75 states (fp32) out and as many in"),
        ("local", "nothing holds the replicas together"),
    ],
)
def test_every_outer_method_is_described(tmp_path: Path, method: str, said: str) -> None:
    file = tmp_path / "run.toml"
    text = published_text().replace("[outer]", f'[outer]\nmethod = "{method}"')
    file.write_text(text, encoding="utf-8")
    assert said in told(str(file))


# --- the numbers --------------------------------------------------------------------------------


def test_a_pair_sends_one_state_and_waits_for_it() -> None:
    averaging = report().stages[0].round
    assert averaging.sent == averaging.blocking == 4 * TINY_STAGE_0
    assert averaging.per_token == 4 * TINY_STAGE_0 / (25 * 2 * 2 * 128)
    assert averaging.seconds == pytest.approx(0.05 + 4 * TINY_STAGE_0 * 8 / 100e6)


def test_averaging_that_sends_more_than_activations_is_noted() -> None:
    def is_noted(**settings: Any) -> bool:
        return any("averaging sends" in note for note in report(**settings).notes)

    assert is_noted(outer__inner_steps=1)
    assert not is_noted(outer__inner_steps=100)
    assert not is_noted(outer__inner_steps=1, outer__method="local")
    for name in PRESETS:
        assert "averaging sends" not in told("--preset", name)


def test_a_round_of_a_fragment_sends_its_part_and_the_last_ones_all() -> None:
    cut: dict[str, Any] = {"outer__fragments": 4, "outer__alpha": 0.0, "outer__gamma": 1.0}
    slow = AssumedLinks(mbit=1.0, latency=0.05)
    short = report(links=slow, limits__gossip_deadline=3.0, **cut)
    assert short.stages[0].round.sent == 4 * -(-TINY_STAGE_0 // 4)
    assert short.stages[0].round.seconds < 3.0
    assert any("limits.gossip_deadline" in note for note in short.notes)
    assert "one of 4 fragments of the state (fp32) out" in sentences(short, changed(**cut), slow)["averaging"]


def test_what_travels_early_is_not_waited_for() -> None:
    early = report(outer__overlap="phi-early", wire__gossip="bf16", wire__progress="int8").stages[0].round
    assert early.blocking == nbytes_of("int8", [TINY_STAGE_0])
    assert early.sent == early.blocking + 2 * TINY_STAGE_0


def test_one_group_of_all_sends_nearly_two_states_and_keeps_replicas_equal() -> None:
    found = report(replicas=4, outer__method="diloco")
    assert found.stages[0].round.sent == 1.5 * 4 * TINY_STAGE_0
    assert found.stability is not None
    assert found.stability.bound == 3.0
    assert found.stability.spread == 0.0


def test_a_replica_by_itself_sends_nothing() -> None:
    for found in (report(replicas=1), report(outer__method="local")):
        assert found.stages[0].round.sent == found.stages[0].round.seconds == 0
    assert report(replicas=1).stages[0].all_reduce.sent == 0


def test_an_all_reduce_in_every_step_costs_k_times_nearly_twice_as_much_per_token() -> None:
    stage = report(replicas=8).stages[0]
    assert stage.all_reduce.per_token / stage.round.per_token == pytest.approx(25 * 2 * 7 / 8)


def test_the_least_step_time_keeps_waiting_at_five_percent() -> None:
    found = report()
    waits = max(stage.round.seconds for stage in found.stages)
    assert waits / (waits + 25 * found.least_step_seconds) == pytest.approx(0.05)


def test_a_hop_carries_activations_with_labels_and_brings_gradients() -> None:
    hop = report(wire__activations="int8", wire__gradients="bf16").hop
    assert hop is not None
    assert (hop.forward, hop.back) == (64 * (1 + 1 / 64) + 4, 128)


def test_a_single_stage_has_no_hops() -> None:
    contents = TINY.model_dump() | {"stages": 1}
    assert report_on(manifest_from(contents), 8, LINKS).hop is None


@pytest.mark.parametrize("replicas", [1, 2, 3, 7, 1000])
def test_any_number_of_replicas_has_a_spread(replicas: int) -> None:
    stability = report(replicas=replicas).stability
    assert stability is not None
    assert math.isfinite(stability.spread)
    assert (stability.spread > 0) == (replicas > 2)  # two are equal after each round


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"outer__method": "local"}, "drift apart"),
        ({"outer__gamma": 1.45}, "close to its bound"),
        ({"outer__method": "diloco", "outer__overlap": "phi-early"}, "no effect"),
        ({"wire__progress": "int8"}, "no effect"),
    ],
)
def test_what_may_not_be_meant_is_noted(settings: dict[str, Any], said: str) -> None:
    (note,) = report(**settings).notes
    assert said in note
    assert report().notes == ()


def test_the_study_of_loss_against_bytes_is_cited_where_it_tried_something_similar() -> None:
    published: dict[str, Any] = {"outer__alpha": 0.5, "outer__beta": 0.7, "outer__gamma": 0.7}
    said = report(**published, outer__inner_steps=25).study
    assert said is not None
    assert "noloco k=25 α=0.5 β=0.7 γ=0.7: +" in said
    assert "of the bytes" in said
    assert report(**published, outer__inner_steps=20).study == said  # the nearest that was tried
    assert report(outer__method="diloco", outer__inner_steps=5000).study is None
    assert "study" in told("--preset", "tiny")


def test_where_the_study_knows_better_for_as_many_bytes_it_says_so() -> None:
    said = report(outer__alpha=0.5, outer__beta=0.7, outer__gamma=0.7, outer__inner_steps=2).study
    assert said is not None
    assert "the best with no more bytes was" in said
    best = min(read_points(), key=lambda point: point.loss)
    assert best.share >= 0.5  # nothing beats sending everything


# --- what is wrong ------------------------------------------------------------------------------


def problems(file: Path) -> list[str]:
    answer = run(str(file))
    assert answer.exit_code == 2
    assert "Traceback" not in answer.output
    assert answer.stdout == ""
    doing, *lines = answer.stderr.splitlines()
    assert doing == "Working out what the run takes …"
    return lines


def written(folder: Path, *replacements: tuple[str, str]) -> Path:
    text = published_text()
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    file = folder / "run.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_each_problem_has_a_line_of_its_own(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        ("gamma = 0.7", "gamma = 1.6"),
        ('gossip = "fp32"', 'gossip = "zip"'),
        ("sequence_tokens = 128", "sequences_tokens = 128"),
    )
    lines = problems(file)
    assert lines[0] == f"error: {file} has 4 problems:"
    assert len(lines) == 5
    for words in (
        ("outer.gamma 1.6", "between 0 and 1.500"),
        ("wire.gossip", "'fp32', 'fp16', 'bf16', 'int8', 'mod4', 'mod3' or 'mod2'"),
        ("data.sequence_tokens is missing", "add it"),
        ("data.sequences_tokens is not a setting", 'Did you mean "sequence_tokens"?'),
    ):
        assert sum(all(word in line for word in words) for line in lines) == 1


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("beta = 0.7", "beta = -1", "outer.beta cannot be used: it should be greater than 0."),
        ("stages = 2", 'stages = "two"', "stages cannot be used: it should be a valid integer"),
        ("stages = 2", "stages = 9", "stages 9 exceeds model.layers 4: lower it"),
        ("stages = 2", "stages = = 2", "not valid TOML"),
        (
            "[limits]",
            "[surprise]",
            "surprise is not a setting: remove it or correct its name. Known here: name",
        ),
        ("[model]", "[[model]]", "model"),
    ],
)
def test_a_problem_says_where_and_what_to_do(tmp_path: Path, old: str, new: str, said: str) -> None:
    (line,) = [line for line in problems(written(tmp_path, (old, new))) if "problems:" not in line]
    assert said in line


def test_problems_are_told_to_programs_too(tmp_path: Path) -> None:
    answer = run(str(written(tmp_path, ("alpha = 0.5", "alpha = 1.5"))), "--json")
    assert answer.exit_code == 2
    contents = json.loads(answer.stdout)
    assert contents["ok"] is False
    assert len(contents["problems"]) == 1
    assert "outer.alpha" in contents["problems"][0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Name either a manifest file or a preset"),
        (("run.toml", "--preset", "tiny"), "Name either"),
        (("--preset", "llama-70b"), "Choose one of: tiny"),
        (("nowhere.toml",), "nowhere.toml"),
        (("/",), "Cannot read"),
        (("--preset", "tiny", "--replicas", "0"), "--replicas"),
        (("--preset", "tiny", "--mbit", "0"), "--mbit"),
        (("--preset", "tiny", "--latency-ms", "-5"), "--latency-ms"),
    ],
)
def test_a_wrong_call_is_told_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    answer = run(*arguments)
    assert answer.exit_code == 2
    (line,) = [line for line in answer.stderr.splitlines() if "rror:" in line]
    assert said in line
    assert "Traceback" not in answer.output
