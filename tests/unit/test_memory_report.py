"""What `noloco manifest check` says of memory and of named devices."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from bootstrap.checking.devices import measured_here
from bootstrap.checking.manifest_cli import app
from bootstrap.checking.report import AssumedLinks, fit_of, memory_figures, report_of, report_on
from node.machine.devices import DEVICES, GB, Device
from node.model.resources import least_memory, memory_needed
from node.model.stage import parameter_count, work_of
from protocol.run.manifest import load_preset

SMALL, LARGE = load_preset("llama-125m"), load_preset("llama-6.8b")


def check(*arguments: str) -> str:
    answer = CliRunner().invoke(app, ["check", *arguments], env={"COLUMNS": "160"})
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def test_the_parts_of_the_memory_add_up() -> None:
    figures = memory_figures(SMALL, 0)
    parameters = parameter_count(SMALL, 0)
    assert figures.state == 24 * parameters
    assert figures.buffers.checkpoint == 20 * parameters
    together = figures.state + figures.buffers.total + figures.microbatch.of(figures.in_flight)
    assert figures.whole == together == memory_needed(SMALL, 0)
    assert figures.least == least_memory(SMALL, 0) < figures.whole / 2


def test_memory_devices_and_bytes_are_told() -> None:
    words = " ".join(check("--preset", "llama-125m", "--device", "a100,4090,cpu").split())
    for said in (
        "Memory of one replica",
        "at least",
        "a100 80 GB 312 35%",
        "cpu 32 GB 0.77 35%",
        "35% is assumed to be reached",
        "A microbatch of 8 × 1,024 tokens is 12.0 MiB forward and 12.0 MiB back, the 80 of a round 1.9 GiB",
    ):
        assert said in words, words


def test_the_expected_speed_is_arithmetic_and_the_optimizers_step() -> None:
    device = Device("slow", tflops=1.0, bandwidth=10.0, memory=1000.0, efficiency=0.5)
    report = report_of(SMALL, device)
    step = 4 * 8 * 1024
    for stage in (0, 1):
        seconds = step * 6 * work_of(SMALL, stage) / 0.5e12 + 32 * parameter_count(SMALL, stage) / (10 * GB)
        assert report.stages[stage].tokens_per_second == pytest.approx(step / seconds)
    assert report.slowest == min(stage.tokens_per_second for stage in report.stages)


def test_a_small_model_waits_for_its_kernels() -> None:
    tiny = load_preset("tiny")
    seconds_of_microbatch = 2 * 128 / report_of(tiny, DEVICES["h100"]).slowest
    assert seconds_of_microbatch == pytest.approx(2 * 100 * 5e-6, rel=0.01)


def test_what_does_not_fit_a_device_is_said() -> None:
    assert fit_of(LARGE, 0, DEVICES["4090"]) == "no"
    assert fit_of(LARGE, 1, DEVICES["h200"]) == "whole"
    assert report_of(LARGE, DEVICES["4090"]).slowest == 0.0
    assert "does not fit" in check("--preset", "llama-6.8b", "--device", "4090")


def test_this_machine_is_measured() -> None:
    here = measured_here(load_preset("tiny"))
    assert 0 < here.tflops < 10_000
    assert here.bandwidth > 0.01
    assert here.efficiency == 1.0
    contents = json.loads(check("--preset", "tiny", "--measure", "--json"))
    assert contents["devices"][0]["device"]["name"] == "here"
    assert contents["stages"][0]["memory_parts"]["least"] > 0


def test_an_unknown_device_is_told_with_the_known_ones() -> None:
    answer = CliRunner().invoke(app, ["check", "--preset", "tiny", "--device", "a100,abacus"])
    assert answer.exit_code == 2
    assert "'abacus'" in answer.output
    assert "h100" in answer.output


def test_deadlines_that_the_links_cannot_keep_are_noted() -> None:
    slow = report_on(LARGE, 8, AssumedLinks(mbit=1.0, latency=0.05))
    assert sum("deadline" in note for note in slow.notes) == 2
    assert not report_on(load_preset("tiny"), 8, AssumedLinks(mbit=100.0, latency=0.05)).notes
