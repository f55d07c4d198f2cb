"""`benchmarks/latency.py`: the paper's factor of ten, where it comes from, and what is left of it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import latency
import numpy as np
import pytest
from reporting.report import run as run_benchmark
from synchronising import sync_times
from synchronising.idle import Round, blocked
from synchronising.sync_times import (
    SyncTimes,
    expected_sync,
    simulate_sync,
    slower_of_two,
    slowest_of,
)

from protocol.errors import UserError

# N, σ, tree, pair via one, pair at once, ratios, slowest pair: the project's reference, by Monte Carlo elsewhere
REFERENCE = [
    (64, 0.0, 12, 2, 1, 6, 12, 1),
    (1024, 0.0, 20, 2, 1, 10, 20, 1),
    (64, 0.5, 15.5, 2.27, 1.44, 6.8, 10.7, 3.3),
    (1024, 0.5, 27.3, 2.27, 1.45, 12, 19, 5.1),
    (64, 1.0, 34.3, 3.29, 2.50, 10, 14, 11.5),
    (1024, 1.0, 76.7, 3.30, 2.50, 23, 31, 27.3),
]
Told = Callable[..., tuple[Any, str, str]]
ROUND = Round(inner_steps=50, step=20.0, variation=0.3)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# --- one synchronisation ------------------------------------------------------------------------


@pytest.mark.parametrize("row", REFERENCE)
def test_the_reference_table_is_met_with_and_without_sampling(row: tuple[float, ...]) -> None:
    n, sigma = int(row[0]), row[1]
    tree, via_one, at_once, to_one, to_both, slowest = row[2:]
    simulated = simulate_sync(n, sigma, 2000, generator(1))
    for times, tolerance in ((simulated, 0.03), (expected_sync([n], sigma)[n], 0.015)):
        assert times.tree == pytest.approx(tree, rel=tolerance)
        assert times.pair_via_one == pytest.approx(via_one, rel=tolerance)
        assert times.pair_at_once == pytest.approx(at_once, rel=tolerance)
        assert times.slowest_pair == pytest.approx(slowest, rel=tolerance)
        assert times.tree / times.pair_via_one == pytest.approx(to_one, abs=0.5 + tolerance * to_one)
        assert times.tree / times.pair_at_once == pytest.approx(to_both, abs=0.5 + tolerance * to_both)


@pytest.mark.parametrize("n", [2, 4, 32, 1024])
def test_without_variation_messages_are_counted(n: int) -> None:
    counted = SyncTimes(
        tree=2 * math.log2(n), ring=2 * (n - 1), pair_via_one=2, pair_at_once=1, slowest_pair=1
    )
    assert simulate_sync(n, 0.0, 10, generator()) == counted
    for name, value in vars(expected_sync([n], 0.0)[n]).items():
        assert value == pytest.approx(getattr(counted, name), abs=1e-9)


@pytest.mark.parametrize("n", [2, 3, 5, 6, 7, 100])
@pytest.mark.parametrize("sigma", [0.3, 1.0])
def test_sampling_agrees_with_expectation_for_any_number_of_replicas(n: int, sigma: float) -> None:
    simulated, expected = simulate_sync(n, sigma, 4000, generator(n)), expected_sync([n], sigma)[n]
    assert abs(simulated.tree - expected.tree) < 4 * simulated.error
    assert simulated.pair_via_one == pytest.approx(expected.pair_via_one, rel=0.02)
    assert simulated.pair_at_once == pytest.approx(expected.pair_at_once, rel=0.02)
    assert simulated.slowest_pair == pytest.approx(expected.slowest_pair, rel=0.08)


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0, 2.0])
def test_the_slower_of_two_has_a_closed_form(sigma: float) -> None:
    assert slowest_of(2, sigma) == pytest.approx(slower_of_two(sigma), rel=1e-6)
    assert slowest_of(1, sigma) == pytest.approx(math.exp(sigma**2 / 2), rel=1e-6)


def test_a_long_ring_goes_on_as_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    short = simulate_sync(700, 0.5, 20, generator(2)).ring
    monkeypatch.setattr(sync_times, "RING_MESSAGES", 10_000)
    monkeypatch.setattr(sync_times, "RING_REPLICAS", 10_000)
    assert short == pytest.approx(simulate_sync(700, 0.5, 2, generator(3)).ring, rel=0.02)


def test_bytes_take_the_time_of_the_states_that_go_over_a_link() -> None:
    n, transfer = 1024, 1e6
    times = simulate_sync(n, 0.0, 10, generator(), transfer)
    assert times.tree == pytest.approx(20 * transfer, rel=1e-4)
    assert times.pair_via_one == pytest.approx(2 * transfer, rel=1e-4)
    assert times.pair_at_once == pytest.approx(transfer, rel=1e-4)
    assert times.ring / times.pair_at_once == pytest.approx(2 * (n - 1) / n, rel=1e-2)


# --- time blocked -------------------------------------------------------------------------------


def standing(n: int, rounds: Round, sigma: float = 0.0) -> Any:
    sync = simulate_sync(n, sigma, 200, generator(n))
    return blocked(n, rounds, sync, sigma, 0.0, generator(n))


def test_with_equal_steps_only_the_exchange_itself_blocks() -> None:
    found = standing(64, Round(inner_steps=50, step=20.0, variation=0.0))
    assert found.all_reduce == pytest.approx(12 / 1012)
    for share in (found.pair_one_round, found.pair_every_round, found.pair_training_on):
        assert share == pytest.approx(1 / 1001)


def test_an_all_reduce_waits_ever_longer_and_a_pair_does_not() -> None:
    small, middle, large = (standing(n, ROUND) for n in (8, 128, 2048))
    assert small.all_reduce < middle.all_reduce < large.all_reduce
    assert large.all_reduce > 3 * large.pair_every_round
    assert large.pair_every_round < 1.2 * middle.pair_every_round
    assert small.pair_one_round == large.pair_one_round


def test_waiting_for_a_partner_makes_the_next_partner_wait_up_to_a_limit() -> None:
    """A clock is the latest of 2^r chains after r rounds, so a round lasts σ·√(2·ln 2) above its mean at most."""
    two, many = standing(2, ROUND), standing(2048, ROUND)
    assert two.pair_every_round == pytest.approx(two.pair_one_round, rel=0.05)
    limit = 1 - ROUND.mean / (ROUND.mean * (1 + ROUND.sigma * math.sqrt(2 * math.log(2))) + 1)
    assert 1.5 * many.pair_one_round < many.pair_every_round < 1.03 * limit


def test_with_an_odd_number_somebody_is_alone_and_waits_for_nobody() -> None:
    assert 0 < standing(3, ROUND).pair_every_round < standing(4, ROUND).pair_every_round


# --- the command --------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Told:
    """Runs the command; returns its exit code, its output and what it says on stderr."""

    def run(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["latency.py", "--samples", "200", *arguments])
        code: Any = 0
        try:
            run_benchmark(latency.main, UserError)
        except SystemExit as end:
            code = end.code
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def results(told: Told, *arguments: str) -> list[dict[str, Any]]:
    code, output, _ = told("--json", *arguments)
    assert code == 0
    found: list[dict[str, Any]] = json.loads(output)["results"]
    return found


@pytest.mark.long
def test_the_tables_say_where_the_factor_of_ten_comes_from(told: Told) -> None:
    _, output, _ = told("--replicas", "1024", "--sigma", "0,1")
    assert "20 / 2 = 10" in " ".join(output.split())
    assert "only if nobody waits for the slowest pair" in " ".join(output.split())
    assert len([line for line in output.splitlines() if line.split()[:2] == ["1024", "0"]]) == 2


def test_json_has_a_result_for_each_number_and_variation(told: Told) -> None:
    found = results(told, "--replicas", "2,1024,64", "--sigma", "0.5,0")
    assert [(r["replicas"], r["sigma"]) for r in found] == [
        (2, 0), (2, 0.5), (64, 0), (64, 0.5), (1024, 0), (1024, 0.5),
    ]  # fmt: skip
    assert found[4]["ratios"]["tree_to_pair_via_one"] == 10
    assert found[5]["expected"]["tree"] == pytest.approx(27.3, abs=0.1)
    assert found[5]["expected"]["ring"] is None  # not NaN, which is not JSON
    assert 0 < found[5]["blocked"]["pair_every_round"] < found[5]["blocked"]["all_reduce"] < 1


def test_one_number_is_the_end_of_the_powers_of_two(told: Told) -> None:
    found = results(told, "--replicas", "20", "--sigma", "0")
    assert [point["replicas"] for point in found] == [2, 4, 8, 16, 20]


def test_a_point_depends_on_its_seed_alone_not_on_what_else_is_asked(told: Told) -> None:
    together = results(told, "--replicas", "8,16", "--sigma", "0,0.5", "--seed", "7")
    assert results(told, "--replicas", "16,32", "--sigma", "0.5", "--seed", "7")[0] == together[3]
    assert results(told, "--replicas", "16,32", "--sigma", "0.5", "--seed", "8")[0] != together[3]


def test_state_and_bandwidth_give_the_time_of_the_bytes(told: Told) -> None:
    options = ("--replicas", "8,16", "--sigma", "0", "--latency-ms", "100")
    plain = results(told, *options)[0]
    # 0.5 s, 5 messages
    loaded = results(told, *options, "--bandwidth", "80", "--state-bytes", "5000000")[0]
    assert loaded["pair_at_once"] == plain["pair_at_once"] + 5
    assert loaded["tree"] == plain["tree"] + 6 * 5


def test_the_plot_is_an_svg_with_its_words_as_text(told: Told, tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "latency.svg"
    assert told("--replicas", "8", "--sigma", "0,1", "--plot", str(file))[0] == 0
    assert "tree all-reduce" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--replicas", "1"), "'1': give whole numbers"),
        (("--replicas", "8,many"), "--replicas: '8,many'"),
        (("--replicas", "1000000"), "65536"),
        (("--sigma", "-1"), "--sigma: '-1'"),
        (("--sigma", "nan"), "--sigma: 'nan'"),
        (("--sigma", "5"), "from 0 to 2"),
        (("--bandwidth", "100"), "--state-bytes"),
        (("--state-bytes", "100"), "--bandwidth"),
        (("--samples", "0"), "--samples"),
        (("--steps", "0"), "--steps"),
        (("--step-variation", "-0.1"), "--step-variation"),
        (("--replicas", "4", "--plot", "latency.gif"), ".svg"),
        (("--replicas", "4", "--plot", "/proc/nowhere/latency.svg"), "/proc/nowhere"),
    ],
)
def test_a_wrong_option_is_told_in_one_line(told: Told, arguments: tuple[str, ...], said: str) -> None:
    code, _, errors = told(*arguments)
    assert code not in (0, None)
    lines = [line for line in [*errors.splitlines(), str(code)] if "error:" in line]
    assert len(lines) == 1
    assert said in lines[0]
