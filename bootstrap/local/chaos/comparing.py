"""`noloco swarm --chaos SEED`: the same training undisturbed, then disturbed, and the difference."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import psutil
from rich.console import Console

from bootstrap.local.chaos.disturber import PERIOD_SECONDS, Disturber, Schedule
from bootstrap.local.chaos.faults import obey
from bootstrap.local.chaos.report import ChaosReport, Run
from bootstrap.local.plan import LocalPlan
from bootstrap.local.progress import StatusLine
from bootstrap.local.swarm import LocalSwarm
from node.machine.processes import on_interrupt

END_SECONDS = 5.0  # for processes that were told to end, before they count as left behind
CHECKPOINT_MINUTES = 0.25  # a node that is killed every few minutes has one to come back with


async def run_both(plan: LocalPlan, console: Console, progress: StatusLine, seed: int) -> ChaosReport:
    """Each for `plan.minutes`. The summary is that of the disturbed run, with the comparison in it."""
    plan = replace(plan, ends_by_clock=True, checkpoint_minutes=CHECKPOINT_MINUTES)
    console.print(f"First the undisturbed run, {plan.minutes:g} minutes.")
    aside = plan.directory / "undisturbed"
    calm = _swarm(replace(plan, directory=aside, summary=aside / "summary.json"), console, progress)
    on_interrupt(lambda _: calm.stop())
    await calm.run()
    if not calm.summary.complete:
        return ChaosReport(seed, False, calm.run_seen(), Run())
    console.print(f"Now the same with a fault every {PERIOD_SECONDS:.0f} s, drawn from the seed {seed}.")
    swarm = _swarm(replace(plan, directory=plan.directory / "disturbed"), console, progress)
    schedule = Schedule(seed, plan.names())
    disturber = Disturber(swarm, schedule, lambda text: console.print(text, soft_wrap=True, markup=False))
    swarm.beside = disturber.run
    on_interrupt(lambda _: swarm.stop())
    await swarm.run()
    report = _report(seed, calm, disturber)
    swarm.summary.chaos = report.for_summary()
    swarm.summary.write(plan.summary)
    return report


def _report(seed: int, calm: LocalSwarm, disturber: Disturber) -> ChaosReport:
    """Of two runs that have ended."""
    swarm = disturber.swarm
    places = sorted(str(path) for path in disturber.places if path.exists())
    return ChaosReport(
        seed,
        swarm.summary.complete,
        calm.run_seen(),
        swarm.run_seen(),
        faults=disturber.done,
        ended=disturber.ended,
        restarted_parts=_restarted_parts(node.directory for node in swarm.nodes.all),
        left_behind=_left(disturber.processes) + places,
    )


def _swarm(plan: LocalPlan, console: Console, progress: StatusLine) -> LocalSwarm:
    plan.directory.mkdir(parents=True, exist_ok=True)
    return LocalSwarm(plan, console, progress, obey)


def _restarted_parts(directories: Iterable[Path]) -> dict[str, int]:
    """How often parts of nodes failed and were started again, by their names."""
    restarts: Counter[str] = Counter()
    for directory in directories:
        path = directory / "events.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            if '"part-failed"' in line and line.endswith("}"):
                restarts[json.loads(line)["part"]] += 1
    return dict(restarts)


def _left(processes: Iterable[psutil.Process]) -> list[str]:
    _, alive = psutil.wait_procs(list(processes), timeout=END_SECONDS)
    return [f"process {process.pid} {process.name()}" for process in alive]
