"""What `noloco manifest check --device` promises: the slower of computing and links, and what it costs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bootstrap.checking.cost_tables import in_words
from bootstrap.checking.costs import Cost, Limit, Prices, cost_of, step_time
from bootstrap.checking.manifest_cli import app
from bootstrap.checking.report import AssumedLinks, report_of, speed_of
from node.machine.devices import DEVICES, Device, Timed
from protocol.run.manifest import Manifest, load_preset

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from pipelines.chain import manifest_of
from pipelines.promise import as_fast_as, promised

SMALL = load_preset("llama-125m")
HOME = AssumedLinks(100.0, 0.05)
FAST = AssumedLinks(1e6, 0.0)


def told(*arguments: str) -> str:
    answer = CliRunner().invoke(app, ["check", *arguments], env={"COLUMNS": "80"})
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def cost(
    manifest: Manifest = SMALL, device: str = "4090", links: AssumedLinks = HOME, price: float = 0.0
) -> Cost:
    found = cost_of(manifest, DEVICES[device], links, 8, Prices(price))
    assert found is not None
    return found


def test_a_fast_device_on_a_home_link_is_promised_what_its_bytes_allow() -> None:
    """It was promised 79,269 tokens a second, where activations of 1,540 bytes over 100 Mbit/s allow 8,117."""
    found = cost()
    assert found.compute_tokens_per_second == pytest.approx(79_269, rel=1e-3)
    assert found.tokens_per_second < found.link_tokens_per_second < 8_117
    assert (found.limit, found.stage) == (Limit.UPLINK, 0)
    assert found.helps[0].tokens_per_second > found.tokens_per_second


def test_a_slow_device_is_limited_by_its_arithmetic_and_an_endless_link_costs_nothing() -> None:
    assert cost(device="cpu").limit is Limit.COMPUTE
    one_stage = Manifest.model_validate(SMALL.model_dump() | {"stages": 1})
    found = cost_of(one_stage, DEVICES["a100"], FAST, 1)
    assert found is not None
    assert found.tokens_per_second == pytest.approx(report_of(one_stage, DEVICES["a100"]).slowest, rel=0.01)
    assert found.uploaded == found.downloaded == (0.0,)


def test_the_slower_direction_counts() -> None:
    uplink = cost(links=AssumedLinks.between(2.5e6, 125e6, 0.05))
    downlink = cost(links=AssumedLinks.between(125e6, 2.5e6, 0.05))
    assert (uplink.limit, downlink.limit) == (Limit.UPLINK, Limit.DOWNLINK)
    assert uplink.tokens_per_second < cost().tokens_per_second / 2


def test_hours_bytes_and_money_follow_from_the_tokens() -> None:
    found = cost(price=0.35)
    inner = SMALL.inner
    of_replica = inner.total_steps * inner.microbatches * SMALL.tokens_per_microbatch
    assert found.tokens == 8 * of_replica
    assert found.hours == pytest.approx(of_replica / found.tokens_per_second / 3600)
    assert found.rent == pytest.approx(0.35 * 16 * found.hours)
    assert found.kwh == pytest.approx(0.450 * 16 * found.hours)
    assert found.uploaded[0] > 1.05 * 1_540 * of_replica
    assert found.uploaded[0] / 1e12 == pytest.approx(1.42, abs=0.01)


def test_a_narrow_uplink_slows_both_directions_of_a_pipeline_down() -> None:
    """Of two equal volunteers each receives no faster than the other sends."""
    narrow = AssumedLinks.between(1.25e6, 12.5e6, 0.02)
    both = AssumedLinks.between(1.25e6, 1.25e6, 0.02)
    assert cost(links=narrow).tokens_per_second == pytest.approx(cost(links=both).tokens_per_second)


@pytest.mark.parametrize(
    ("prices", "said"),
    [
        (("--kwh-price", "0.3"), "At full load they take 327 kWh, which cost 98."),
        (("--kwh-price", "0.001"), "they take 327 kWh, which cost 0.33."),
        (("--watts", "1", "--kwh-price", "0.3"), "they take 0.73 kWh, which cost 0.22."),
        (("--watts", "600", "--kwh-price", "0.3"), "At full load they take 436 kWh, which cost 131."),
    ],
)
def test_power_goes_by_the_devices_watts_or_those_that_are_named(prices: tuple[str, ...], said: str) -> None:
    assert said in " ".join(told("--preset", "llama-125m", "--device", "4090", *prices).split())


def test_a_device_whose_watts_nobody_knows_is_told_so() -> None:
    unknown = replace(DEVICES["4090"], watts=0.0)
    found = cost_of(SMALL, unknown, HOME, 8)
    assert found is not None
    assert found.kwh == 0
    assert "name its --watts" in in_words(found, 8)


def test_a_timed_machine_is_promised_what_was_timed() -> None:
    timed = Timed(layer=1e-3, head=2e-3, encoding=1e-4)
    device = Device("here", 1.0, 1e9, 1e3, is_gpu=False, efficiency=1.0, timed=timed)
    speeds = [speed_of(SMALL, stage, device).tokens_per_second for stage in (0, 1)]
    layers = [len(SMALL.layers_of(stage)) for stage in (0, 1)]
    assert speeds[0] == pytest.approx(1 / (1e-3 * layers[0] + 1e-4), rel=0.01)
    assert speeds[1] == pytest.approx(1 / (1e-3 * layers[1] + 2e-3 + 1e-4), rel=0.01)


def test_what_helps_is_computed_and_not_guessed() -> None:
    found = cost()
    shorter = next(change for change in found.helps if "int8" in change.setting)
    contents = SMALL.model_dump()
    contents["wire"] |= {"activations": "int8", "gradients": "int8"}
    again = cost(Manifest.model_validate(contents))
    assert again.tokens_per_second == pytest.approx(shorter.tokens_per_second)


def test_it_is_told_within_eighty_columns() -> None:
    text = told("--preset", "llama-125m", "--device", "4090", "--uplink", "100Mbit", "--price", "0.35")
    words = " ".join(text.split())
    for said in (
        "6.55 billion tokens in 45.5 h, with 8 replicas of 2 stages",
        "A volunteer sends 1.42 TB and receives 1.42 TB",
        "The devices cost 255 in all. At full load they take 327 kWh.",
        "What limits is the uplink of stage 0.",
        'wire.activations and gradients "int8"',
    ):
        assert said in words
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


@pytest.mark.parametrize("preset", ["tiny", "llama-1.3b", "llama-6.8b"])
def test_no_table_folds_at_eighty_columns(preset: str) -> None:
    text = told("--preset", preset, "--device", "a100,4090,h200")
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--preset llama-5m --replicas 2 --uplink 20Mbit", "Fits 4 machines of 4 GB, two replicas a stage, 20"),
        ("--preset llama-125m --device 4090 --replicas 1", "Fits 2 4090s, one replica a stage, 100 Mbit/s up: about"),
        ("--preset llama-6.8b --device cpu,4090", "Does not fit cpu, 4090: more stages, or a smaller model."),
        ("--preset llama-6.8b --replicas 12", "Fits 48 mi355xs, 12 replicas a stage"),
    ],
)  # fmt: skip
def test_the_verdict_is_the_first_line(given: str, said: str) -> None:
    text = told(*given.split())
    assert " ".join(text.split()).startswith(said)
    assert json.loads(told(*given.split(), "--json"))["verdict"].startswith(said)


def test_json_has_the_costs() -> None:
    contents = json.loads(told("--preset", "llama-125m", "--device", "4090", "--json"))
    assert contents["devices"][0]["cost"]["limit"] == "the uplink"
    assert (
        json.loads(told("--preset", "llama-6.8b", "--device", "4090", "--json"))["devices"][0]["cost"] is None
    )


def test_a_link_that_is_none_is_refused_in_a_sentence() -> None:
    answer = CliRunner().invoke(app, ["check", "--preset", "tiny", "--uplink", "fast"])
    assert answer.exit_code == 2
    assert "write it as 20Mbit" in answer.stderr


# --- against what was measured (docs/experiments/wan.md) ------------------------------------------

# two stages of real processes, 16,384 tokens to a step, tokens/s against the unshaped run: one way in ms, Mbit/s
MEASURED = {
    ("fp32", 512): {
        (150, 1000): 1.044,
        (150, 100): 1.054,
        (150, 30): 0.961,
        (50, 100): 0.935,
        (50, 30): 0.916,
    },
    ("bf16", 512): {
        (150, 1000): 0.935,
        (150, 100): 0.968,
        (150, 30): 0.913,
        (50, 300): 0.996,
        (10, 30): 1.023,
    },
    ("int8", 512): {
        (150, 1000): 0.950,
        (150, 30): 0.985,
        (50, 100): 0.916,
        (10, 1000): 0.974,
        (10, 30): 1.067,
    },
    ("bf16", 128): {
        (150, 1000): 0.934,
        (150, 300): 0.931,
        (150, 100): 0.922,
        (150, 30): 0.892,
        (10, 300): 0.900,
    },
}
UNSHAPED = {512: 850.0, 128: 5_100.0}  # tokens a second of that machine, about


@pytest.mark.parametrize(("codec", "hidden"), MEASURED)
def test_links_slow_a_run_down_as_much_as_was_measured(codec: str, hidden: int) -> None:
    microbatches, sequences = (64, 1) if hidden == 512 else (64, 4)
    manifest = manifest_of(hidden, microbatches, 0, sequences, activations=codec, gradients=codec)
    device = as_fast_as(manifest, UNSHAPED[hidden])
    unshaped = step_time(manifest, device, FAST, 1).whole
    for (latency, mbit), ratio in MEASURED[codec, hidden].items():
        shaped = step_time(manifest, device, AssumedLinks(mbit, latency / 1e3), 1)
        assert unshaped / shaped.whole == pytest.approx(ratio, rel=0.15)
        assert shaped.limit is Limit.COMPUTE


# hidden, codec, microbatches, sequences, unshaped; the slower direction in Mbit/s, one way in ms; tokens/s. The
# third had 40 Mbit/s down
FULL = [
    (512, "fp32", 16, 1, 730.0, 10.0, 20.0, 422),
    (512, "fp32", 16, 1, 730.0, 10.0, 20.0, 390),
    (512, "fp32", 16, 1, 730.0, 6.0, 20.0, 244),
    (128, "fp32", 8, 4, 9_000.0, 20.0, 20.0, 3_018),
    (128, "fp32", 8, 4, 9_000.0, 10.0, 20.0, 1_589),
    (128, "fp32", 32, 1, 9_000.0, 4.0, 20.0, 728),
    (128, "bf16", 8, 4, 9_000.0, 2.0, 50.0, 673),
]


def test_a_link_that_is_full_is_what_limits_as_it_was_measured_to() -> None:
    """Measured as benchmarks/wan.py --promise does, on a machine that others used (docs/experiments/wan.md)."""
    for hidden, codec, microbatches, sequences, unshaped, mbit, one_way_ms, measured in FULL:
        manifest = manifest_of(hidden, microbatches, 0, sequences, activations=codec, gradients=codec)
        found, limit = promised(manifest, unshaped, mbit, one_way_ms)
        assert found == pytest.approx(measured, rel=0.15)
        assert limit in (Limit.UPLINK, Limit.DOWNLINK)
        assert promised(manifest, unshaped, 100.0, one_way_ms)[1] is Limit.COMPUTE
