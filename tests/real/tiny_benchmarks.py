"""Benchmarks as tests run them: small, each as a process, what it promises to print checked for being there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"

PATIENCE = 240.0  # seconds, on a busy machine; on two idle cores the slowest takes half a minute
VIRTUAL = (
    "choices",
    "false_alarms",
    "front",
    "growth",
    "hours",
    "levels",
    "placed_swarm",
    "poison",
    "staleness",
    "tied",
)  # measure nothing of this machine
QUICK = ("codecs", "latency", "pairing", "placement")  # the others are marked as long
PROMISED: dict[str, tuple[str, ...]] = {
    "watching": ("one_viewer", "two_viewers"),
    "agreement": ("real_minus_simulated",),
    "choices": ("alike_4", "slower_16"),
    "codecs": ("bf16_encode_vs_clone", "int8_encode_vs_clone", "eden4_decode_vs_clone"),
    "data": ("data_wait", "tokenising_by_training"),
    "discovery": ("bytes_of_a_look", "bytes_per_minute", "found", "bytes_of_one_key"),
    "false_alarms": ("set_aside", "still_aside", "harm", "processor"),
    "front": ("loss_gap_at_a_tenth",),
    "gossip": ("plain_vs_hivemind", "overlapped_vs_hivemind", "plain_vs_socket"),
    "growth": ("discovery", "pairing_median", "imbalance", "useful_after", "useful_after_from_20"),
    "gpu": (
        "whole_tiny",
        "two_stages",
        "two_stages_bound_bf16",
        "two_stages_bound_int8",
        "outer_step_by_bytes",
        "snapshot_stall_ms",
        "round_blocked_s",
    ),
    "malformed": ("speed_by_all", "memory_both", "lines_a_minute", "most_frames_until_ban", "not_banned"),
    "latency": ("tree_to_pair_at_once_8_sigma_1", "blocked_all_reduce_to_pair_8_sigma_0"),
    "levels": ("throughput_4", "rounds_4", "alone_4", "blocked_4"),
    "memory": ("stage0_highest", "stage0_lowest", "stage1_highest", "p2pd0_highest", "p2pd1_lowest"),
    "opening": ("waited_20", "ahead_20"),
    "pairing": ("round_trips_to_agree_3", "alone_3", "blocked_fastest_of_4x_time"),
    "pipeline": ("hidden_64",),
    "placed_swarm": ("planned_vs_random_case5_worldwide",),
    "placement": (
        "annealing_to_genetic_worst",
        "scheduled_to_random_case5_worldwide",
        "plan_to_by_hand_worst",
    ),
    "poison": ("sign-flip_0.25_clip_0", "sign-flip_0.25_clip_1.5"),
    "reality": ("throughput", "activations", "rounds", "pairing", "search", "worst"),
    "soak": ("memory_vs_round_100", "descriptors_vs_round_100", "tasks_vs_round_100"),
    "stage": (
        "stage0_vs_tuned",
        "stage1_vs_tuned",
        "layers0_vs_transformers",
        "last_stage_vs_plain",
        "last_stage_memory",
    ),
    "hours": ("noloco_hours_of_all_reduce", "noloco_hours_of_diloco"),
    "staleness": ("one_fp32_staleness_1_loss", "four_bf16_staleness_1_speed"),
    "swarm": ("swarm_vs_plain_loops",),
    "tied": ("untied_2_stages_above_plain", "tied_4_stages_above_plain"),
    "transport": ("goodput_vs_socket", "small_message_slowdown"),
    "wan": ("worst_vs_bound", "least_promised", "most_promised"),
}


def scripts(*, are_virtual: bool) -> list[object]:
    """Cases of a test: those that measure this machine, or those in virtual time, which may run beside others."""
    return [
        pytest.param(script, id=script.stem, marks=() if script.stem in QUICK else (pytest.mark.long,))
        for script in sorted(BENCHMARKS.glob("*.py"))
        if (script.stem in VIRTUAL) == are_virtual
    ]


def ratios_of(script: Path) -> dict[str, float]:
    """What a tiny run of the benchmark ends with; skips where this machine has no shaped links."""
    done = subprocess.run(
        [sys.executable, str(script), "--tiny", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    if (
        done.returncode
        and script.stem in ("opening", "reality", "wan")
        and "error: shaped links need" in done.stderr
    ):
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    ratios: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])["ratios"]
    return ratios
