"""`noloco swarm --chaos SEED`: the same training undisturbed, then disturbed, and the difference."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import psutil
from rich.console import Console

from bootstrap.display import say
from bootstrap.lab.chaos.disturber import PERIOD_SECONDS, Disturber, Schedule, SeenFault
from bootstrap.lab.chaos.faults import obey
from bootstrap.local.nodes import LocalPlan
from bootstrap.local.progress import StatusLine
from bootstrap.local.summary import Curve, Run
from bootstrap.local.swarm import LocalSwarm
from node.machine.processes import on_interrupt

END_SECONDS = 5.0  # for processes that were told to end, before they count as left behind
MOST_LOSS = 0.05  # nats between the two runs
LEAST_THROUGHPUT = 0.7  # of what is present
CHECKPOINT_MINUTES = 0.25  # a node that is killed every few minutes has one to come back with


async def run_both(plan: LocalPlan, console: Console, progress: StatusLine, seed: int) -> ChaosReport:
    """Run both, for `plan.minutes` each. The summary is the disturbed run's, with the comparison in it."""
    plan = replace(plan, ends_by_clock=True, checkpoint_minutes=CHECKPOINT_MINUTES)
    console.print(f"First the undisturbed run, {plan.minutes:g} minutes.")
    aside = plan.directory / "undisturbed"
    calm = _swarm(replace(plan, directory=aside, summary=aside / "summary.json"), console, progress)
    on_interrupt(lambda _: calm.stop())
    await calm.run()
    if not calm.had_its_time:
        return ChaosReport(seed, False, calm.run_seen(), Run())
    console.print(f"Now the same with a fault every {PERIOD_SECONDS:.0f} s, drawn from the seed {seed}.")
    swarm = _swarm(replace(plan, directory=plan.directory / "disturbed"), console, progress)
    schedule = Schedule(seed, plan.names())
    disturber = Disturber(swarm, schedule, partial(say, console))
    swarm.beside = disturber.run
    on_interrupt(lambda _: swarm.stop())
    await swarm.run()
    report = _report(seed, calm, disturber)
    swarm.summary.chaos = report.for_summary()
    swarm.summary.write(plan.summary)
    return report


def _report(seed: int, calm: LocalSwarm, disturber: Disturber) -> ChaosReport:
    """The comparison of two runs that have ended."""
    swarm = disturber.swarm
    places = sorted(str(path) for path in disturber.places if path.exists())
    _, alive = psutil.wait_procs(list(disturber.processes), timeout=END_SECONDS)
    return ChaosReport(
        seed,
        swarm.had_its_time,
        calm.run_seen(),
        swarm.run_seen(),
        faults=disturber.done,
        ended=disturber.ended,
        restarted_parts=_restarted_parts(node.directory for node in swarm.nodes.all),
        left_behind=[*(f"process {process.pid} {process.name()}" for process in alive), *places],
    )


def _swarm(plan: LocalPlan, console: Console, progress: StatusLine) -> LocalSwarm:
    plan.directory.mkdir(parents=True, exist_ok=True)
    return LocalSwarm(plan, console, progress, obey)


def _restarted_parts(directories: Iterable[Path]) -> dict[str, int]:
    """Count how often each part of the nodes failed and was restarted, by name."""
    restarts: Counter[str] = Counter()
    for directory in directories:
        path = directory / "events.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            if '"part-failed"' in line and line.endswith("}"):
                restarts[json.loads(line)["part"]] += 1
    return dict(restarts)


def loss_at(curve: Curve, tokens: int) -> float | None:
    """The loss at `tokens`, interpolated; None outside the curve."""
    for (before, first), (after, second) in pairwise(curve):
        if before <= tokens <= after:
            share = (tokens - before) / (after - before) if after > before else 1.0
            return first + share * (second - first)
    return None


@dataclass(frozen=True)
class ChaosReport:
    """The report on two runs; `complete` is whether both had all their time."""

    seed: int
    complete: bool
    calm: Run
    disturbed: Run
    faults: Sequence[SeenFault] = ()
    ended: dict[str, str] = field(default_factory=dict)  # nodes, by themselves, with their last words
    restarted_parts: dict[str, int] = field(default_factory=dict)
    left_behind: Sequence[str] = ()

    @property
    def losses(self) -> tuple[int, float, float] | None:
        """(tokens, undisturbed loss, disturbed loss), at the tokens of the run that trained on fewer."""
        if not (self.calm.losses and self.disturbed.losses):
            return None
        tokens = min(self.calm.losses[-1][0], self.disturbed.losses[-1][0])
        calm, disturbed = loss_at(self.calm.losses, tokens), loss_at(self.disturbed.losses, tokens)
        return None if calm is None or disturbed is None else (tokens, calm, disturbed)

    @property
    def throughput(self) -> float | None:
        """The disturbed run's rate as a share of what as many undisturbed nodes would reach."""
        expected = self.calm.rate * self.disturbed.present
        return self.disturbed.rate / expected if expected else None

    def for_summary(self) -> dict[str, object]:
        tokens, calm, disturbed = self.losses or (None, None, None)
        return asdict(self) | {
            "tokens": tokens,
            "undisturbed_loss": calm,
            "disturbed_loss": disturbed,
            "throughput": self.throughput,
        }

    def lines(self) -> list[str]:
        """The report for people."""
        lines = ["", f"faults of seed {self.seed}   at       what    whom  answering afterwards"]
        lines += [
            f"{'':20}{seen.seconds:5.0f} s   {seen.kind:7} {seen.node:7} {seen.answering}   {seen.warning}".rstrip()
            for seen in self.faults
        ]
        if self.losses is not None:
            tokens, calm, disturbed = self.losses
            lines.append(
                f"loss               {disturbed:.3f} disturbed, {calm:.3f} undisturbed at {tokens:,} tokens: "
                f"{disturbed - calm:+.3f} ({_verdict(disturbed - calm <= MOST_LOSS)} at most {MOST_LOSS:+})"
            )
        if self.throughput is not None:
            lines.append(
                f"throughput         {self.disturbed.rate:,.0f} tokens/s, undisturbed {self.calm.rate:,.0f}; "
                f"{self.disturbed.present:.0%} of the nodes present: {self.throughput:.2f} of what they would do "
                f"({_verdict(self.throughput >= LEAST_THROUGHPUT)} at least {LEAST_THROUGHPUT})"
            )
        lines += [f"ended by itself    {name}: {words}" for name, words in self.ended.items()]
        restarts = ", ".join(f"{part} {times}×" for part, times in self.restarted_parts.items())
        lines.append(f"parts restarted    {restarts or 'none'}")
        lines.append(f"nodes that ended   {len(self.ended) or 'none'}")
        lines.append(f"left behind        {', '.join(self.left_behind) or 'nothing'}")
        return lines


def _verdict(holds: bool) -> str:
    return "wanted:" if holds else "NOT reached, wanted:"
