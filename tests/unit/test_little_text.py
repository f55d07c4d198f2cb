"""A little text of one's own: a swarm trains on it, and says if nothing is held out. Advice that can be followed."""

from __future__ import annotations

import gc
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bootstrap.evaluation.measuring import WantedLosses
from bootstrap.export.tokenizer import tokenizer_of_run
from bootstrap.lab.simulation.learning import loss_along
from bootstrap.local.measuring import NOTHING_HELD_OUT, Measuring, text_to_measure_on
from bootstrap.local.nodes import LocalPlan
from bootstrap.local.progress import StatusLine
from bootstrap.local.summary import Summary
from bootstrap.local.swarm import LocalSwarm
from bootstrap.tools_cli import app as tools
from node.config import NodeConfig
from node.data.opening import DataPlan, open_data
from protocol.errors import DataError, NothingHeldOut
from protocol.run.manifest import Manifest, load_preset
from tests.swarm.micro import micro_manifest
from tests.unit.corpora import as_jsonl

TINY = load_preset("tiny")


def plan_of(tmp_path: Path, *data: str, manifest: Manifest = TINY) -> LocalPlan:
    return LocalPlan(manifest, 1, tmp_path / "swarm", 1.0, 8, tmp_path / "summary.json", data=data)


def one_file(tmp_path: Path, lines: int = 2700) -> str:
    (tmp_path / "my.txt").write_text("a line of my own text\n" * lines, encoding="utf-8")
    return str(tmp_path / "my.txt")


@pytest.mark.parametrize("lines", [20, 2700])
async def test_losses_are_on_what_is_trained_on_where_nothing_is_held_out(lines: int, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, one_file(tmp_path, lines))
    data = open_data(TINY, plan.data_plan, None)
    tokenizer = tokenizer_of_run(TINY, None)
    with pytest.raises(NothingHeldOut):
        next(data.validation_batches(128, 8))
    text, is_held_out = text_to_measure_on(plan, data, tokenizer)
    assert not is_held_out
    assert 0 < text.sequences <= 8
    assert all(b"my own" in bytes(row.tolist()) for inputs, _ in text.batches for row in inputs)


def test_a_text_of_which_some_is_held_out_is_measured_on_that(tmp_path: Path) -> None:
    plan = plan_of(
        tmp_path, as_jsonl(tmp_path / "rows.jsonl", [f"row {number} " * 40 for number in range(100)])
    )
    data = open_data(TINY, plan.data_plan, None)
    text, is_held_out = text_to_measure_on(plan, data, tokenizer_of_run(TINY, None))
    assert is_held_out
    assert (
        text.batches[0][0] == next(data.validation_batches(128, 8, 8))[0][: len(text.batches[0][0])]
    ).all()


async def test_it_is_said_once_and_stands_in_the_summary(tmp_path: Path) -> None:
    summary, console = Summary(), Console(record=True, quiet=False, width=200)
    measuring = Measuring(plan_of(tmp_path, one_file(tmp_path)), summary)
    await measuring.open()
    await measuring.start(console)
    said = console.export_text()
    assert said.count("Nothing of this text is held out") == 1
    assert "on text that is trained on." in said
    assert not summary.is_held_out
    assert summary.lines()[1].startswith("training loss    start 5.")
    summary.write(tmp_path / "summary.json")
    assert json.loads((tmp_path / "summary.json").read_text())["is_held_out"] is False


async def test_a_swarm_that_fails_before_training_leaves_no_coroutine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(self: Measuring) -> None:
        raise DataError("no text")

    monkeypatch.setattr(Measuring, "open", fails)
    swarm = LocalSwarm(plan_of(tmp_path), Console(quiet=True), StatusLine(lambda _: None))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(DataError, match="no text"):
            await swarm.run()
        gc.collect()
    assert not [str(each.message) for each in seen if "never awaited" in str(each.message)]


def test_a_node_a_swarm_and_an_evaluation_take_the_same_of_data() -> None:
    for _, known in COMMANDS.values():
        assert {"--data", "--text-field"} <= known


# --- advice for the command at hand -------------------------------------------------------------


def options(*command: str) -> set[str]:
    shown = CliRunner().invoke(tools, [*command, "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert shown.exit_code == 0
    return set(re.findall(r"--[a-z][a-z-]*", shown.output))


def refused_by_swarm(tmp_path: Path, *data: str, manifest: Manifest = TINY) -> str:
    plan = plan_of(tmp_path, *data, manifest=manifest)
    with pytest.raises(DataError) as caught:
        open_data(manifest, plan.data_plan, None).require(manifest.data.sequence_tokens)
    return str(caught.value)


def refused_by_eval(tmp_path: Path, *data: str, manifest: Manifest = TINY) -> str:
    wanted = WantedLosses(data, "text", True, None, tmp_path / "cache")
    with pytest.raises(DataError) as caught:
        wanted.text(manifest, None, tokenizer_of_run(manifest, None), 128, 8)
    return str(caught.value)


def refused_by_node(tmp_path: Path, *data: str, manifest: Manifest = TINY) -> str:
    with pytest.raises(DataError) as caught:
        open_data(manifest, DataPlan(data, "text", tmp_path / "cache"), None).require(128)
    return str(caught.value)


COMMANDS: dict[str, tuple[Callable[..., str], set[str]]] = {
    "swarm": (refused_by_swarm, options("swarm")),
    "eval": (refused_by_eval, options("eval")),
    "node": (refused_by_node, {"--" + name.replace("_", "-") for name in NodeConfig.model_fields}),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_advice_names_settings_that_the_command_has(command: str, tmp_path: Path) -> None:
    refused, known = COMMANDS[command]
    (tmp_path / "short.txt").write_text("short")
    as_jsonl(tmp_path / "body.jsonl", ["a"], "body")
    for name in ("cache", "swarm"):  # where documents cannot be kept
        (tmp_path / "full" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "full" / name).touch()
    local = micro_manifest(data__source="local")
    told = [
        refused(tmp_path, str(tmp_path / "short.txt")),
        refused(tmp_path, str(tmp_path / "body.jsonl")),
        refused(tmp_path, str(tmp_path / "missing.txt")),
        refused(tmp_path, "hub:a/b", "c.txt"),
        refused(tmp_path, manifest=local),
        refused(tmp_path / "full", one_file(tmp_path)),
        *([refused(tmp_path, one_file(tmp_path))] if command == "eval" else []),  # nothing is held out
    ]
    for said in told:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", said))
        assert named <= known, said
        assert "found the run" not in said, "none of these commands founds one"


def test_a_simulation_says_what_to_set(tmp_path: Path) -> None:
    class Route:
        manifest = TINY
        passes = None

    data = open_data(TINY, DataPlan((one_file(tmp_path),), "text", tmp_path / "cache"), None)
    with pytest.raises(DataError, match=r"--set data\.held_out"):
        loss_along([Route()], data, 8)  # type: ignore[list-item]


def test_the_sentence_about_nothing_held_out_names_what_a_swarm_has() -> None:
    assert set(re.findall(r"--[a-z-]+", NOTHING_HELD_OUT)) <= options("swarm")
