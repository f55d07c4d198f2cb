"""The board as Prometheus reads it. Base units; what only grows ends in _total; one line of help each.

Counts are as members tell them, each for itself. A member's labels are its stage and its whole peer id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from bootstrap.dashboard.board import LEVELS, Board
from bootstrap.dashboard.rows import Row
from bootstrap.inspect.losses import best_told

MEMBER = ("stage", "peer")


class BoardMetrics(Collector):
    """Makes all metrics anew whenever it is asked."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        yield from self._of_the_run()
        yield from self._of_stages()
        yield from self._of_members(self._board.rows())

    def _of_the_run(self) -> Iterator[Metric]:
        run, now = self._board.run, self._board.now
        best = best_told(s.stats for s in self._board.sightings() if s.stats is not None)
        facts = {"name": run["name"], "run_id": run["id"], "stages": str(run["stages"])}
        yield InfoMetricFamily("noloco_run", "The run that is watched.", value=facts)
        yield CounterMetricFamily(
            "noloco_tokens", "Tokens trained on by the first stage, since it began.", now.tokens
        )
        for name, help_, value in (
            ("noloco_loss_nats", "Training loss per token, the median of those that know it.", now.loss),
            ("noloco_replica_spread", "Spread of the replicas, the median of their estimates.", now.spread),
            (
                "noloco_replica_spread_predicted",
                "Spread of the replicas as theory predicts it.",
                now.expected,
            ),
            ("noloco_tokens_per_second", "Tokens trained on per second by the first stage.", now.rate),
            (
                "noloco_loss_best_nats",
                "Best training loss so far, the mean of a hundred steps.",
                best and best.loss,
            ),
            ("noloco_loss_best_timestamp_seconds", "When the loss was at its best.", best and best.time),
        ):
            if value is not None:
                yield GaugeMetricFamily(name, help_, value)
        counts = Counter(remark.level for remark in self._board.remarks)
        alarms = GaugeMetricFamily("noloco_findings", "Sentences of the verdict, by level.", labels=["level"])
        for level in LEVELS.values():
            alarms.add_metric([level], counts[level])
        yield alarms
        said = GaugeMetricFamily(
            "noloco_finding",
            "1 for each sentence of the verdict, by its kind.",
            labels=["kind", "stage", "level"],
        )
        words = GaugeMetricFamily(
            "noloco_finding_words",
            "1, with the sentence of each finding.",
            labels=["kind", "stage", "sentence"],
        )
        for finding in self._board.findings:
            named = [finding.kind, "" if finding.stage is None else str(finding.stage)]
            said.add_metric([*named, LEVELS[finding.severity]], 1)
            words.add_metric([*named, finding.sentence], 1)
        yield said
        yield words

    def _of_stages(self) -> Iterator[Metric]:
        rows = self._board.rows()
        serving = Counter(
            row["stage"] for row in rows if row["silent"] is None and row["state"] in ("serving", "finished")
        )
        silent = Counter(row["stage"] for row in rows if row["silent"] is not None)
        for name, help_, counts in (
            ("noloco_stage_replicas", "Members that serve a stage and answer.", serving),
            ("noloco_stage_silent_members", "Members of a stage that do not answer.", silent),
        ):
            family = GaugeMetricFamily(name, help_, labels=["stage"])
            for stage in range(self._board.run["stages"]):
                family.add_metric([str(stage)], counts[stage])
            yield family

    def _of_members(self, rows: Sequence[Row]) -> Iterator[Metric]:
        up = GaugeMetricFamily("noloco_member_up", "1 while a member answers, else 0.", labels=MEMBER)
        for row in rows:
            up.add_metric(_labels(row), row["silent"] is None)
        yield up
        gauges: dict[str, tuple[str, str]] = {
            "noloco_member_step": ("step", "Inner steps that a replica has done."),
            "noloco_member_round": ("round", "Rounds that a replica has done."),
            "noloco_member_queue_microbatches": (
                "queue",
                "Microbatches that waited when its last step ended.",
            ),
            "noloco_member_busy_ratio": ("busy", "Share of the last minute spent computing."),
            "noloco_member_tokens_per_second": ("rate", "Tokens per second that a replica trains on."),
            "noloco_member_uptime_seconds": ("uptime", "Seconds since a member came."),
        }
        counters = {
            "noloco_member_tokens": ("tokens", "Tokens that a replica has trained on, in all its lives."),
            "noloco_member_pair_averagings": ("pairs", "Rounds that a member has shared with a partner."),
            "noloco_member_resends": ("resends", "Microbatches that had to be sent again."),
            "noloco_member_gossip_bytes": ("gossip", "Bytes sent for averaging."),
            "noloco_member_passed_on_bytes": (
                "passed_on",
                "Bytes passed on between others that cannot dial each other.",
            ),
        }
        for kind, families in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (field, help_) in families.items():
                family = kind(name, help_, labels=MEMBER)
                for row in rows:
                    if (value := row[field]) is not None:  # type: ignore[literal-required]
                        family.add_metric(_labels(row), value)
                yield family


def _labels(row: Row) -> list[str]:
    return [str(row["stage"]), row["id"]]


def exposition(board: Board) -> tuple[bytes, str]:
    """Return (text, content type) of the answer to Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(BoardMetrics(board))
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
