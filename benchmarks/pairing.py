"""Whether pairing is fair and fast: 10,000 rounds of every replica of a stage under a virtual clock.

Replicas whose speeds differ by up to 5 %, inner steps of 0.5 s with 3 % noise, 25 of them to a round, messages of 20
to 80 ms one way, random starts. `p` is the chi-square test of equally likely pairs; `in vain` counts replicas alone
twice in a row while another that they could have met was alone, too; `released` is how many second ones of two that
agreed are told that they are free, in a round. Then the time that replicas whose speeds differ fourfold are blocked,
from their last inner step of a round to the end of a small exchange. The decisions are `node.rounds.pairing`'s;
messages and steps are events (`partners.simulated_stage`), so ratios do not depend on this machine.
"""

from __future__ import annotations

from random import Random
from typing import Any

from partners.simulated_stage import PairingSetting, SimulatedStage
from reporting.report import Report, arguments_of, parser_of, run
from scipy.stats import chisquare

FOURFOLD = (4.0, 3.4, 2.8, 2.2, 1.6, 1.3, 1.0)


def fairness(replicas: int, rounds: int, seed: int) -> dict[str, Any]:
    """A stage of nearly equal replicas."""
    rng = Random(seed)
    setting = PairingSetting([rng.uniform(0.95, 1.05) for _ in range(replicas)], seed=seed)
    outcome = SimulatedStage(setting).run(rounds)
    counts = list(outcome.pairs.values())
    counts += [0] * (replicas * (replicas - 1) // 2 - len(counts))
    return {
        "replicas": replicas,
        "rounds": min(outcome.rounds.values()),
        "p": round(float(chisquare(counts).pvalue), 4),
        "alone": round(outcome.alone_fraction(), 5),
        "alone_twice_in_vain": outcome.alone_twice_in_vain(),
        "median_round_trips": round(outcome.median_seconds_to_agree() / setting.round_trip, 3),
        "p95_round_trips": round(outcome.late_seconds_to_agree() / setting.round_trip, 2),
        "released": round(outcome.released / outcome.rounds.total(), 3),
        "one_sided": round(outcome.one_sided / outcome.rounds.total(), 6),
    }


def blocking(pace: Any, rounds: int, seed: int) -> dict[str, Any]:
    """Seven replicas of 1 to 4 times the slowest one's speed."""
    outcome = SimulatedStage(PairingSetting(FOURFOLD, pace=pace, seed=seed)).run(rounds)
    blocked = [outcome.blocked_fraction(replica) for replica in range(len(FOURFOLD))]
    return {
        "pace": pace,
        "rounds": min(outcome.rounds.values()),
        "alone": round(outcome.alone_fraction(), 4),
        "blocked_fastest": round(blocked[0], 4),
        "blocked_most": round(max(blocked), 4),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--replicas", type=int, nargs="*", default=[3, 4, 7, 64])
    parser.add_argument("--rounds", type=int, default=10_000, help="of every replica")
    parser.add_argument("--seed", type=int, default=0)
    arguments = arguments_of(parser, replicas=[3], rounds=100)
    report = Report("pairing", arguments.json)
    results, ratios = [], {}
    for replicas in arguments.replicas:
        row = fairness(replicas, arguments.rounds, arguments.seed)
        results.append(row)
        ratios[f"round_trips_to_agree_{replicas}"] = row["median_round_trips"]
        ratios[f"alone_{replicas}"] = row["alone"]
        report.tell_row(row)
    for pace in ("steps", "time"):
        row = blocking(pace, max(1, arguments.rounds // 10), arguments.seed)
        results.append(row)
        ratios[f"blocked_fastest_of_4x_{pace}"] = row["blocked_fastest"]
        report.tell_row(row)
    report.conclude(ratios, results)


if __name__ == "__main__":
    run(main)
