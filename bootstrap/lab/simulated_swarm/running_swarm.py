"""`noloco simulate swarm` from its options to its exit code: simulate, show, check."""

from __future__ import annotations

import time
from pathlib import Path

from bootstrap.display import bars
from bootstrap.lab.simulated_swarm.swarm_checks import broken, checks_of
from bootstrap.lab.simulated_swarm.swarm_outcome import SwarmOutcome
from bootstrap.lab.simulated_swarm.swarm_page import write_page
from bootstrap.lab.simulated_swarm.swarm_report import as_json, show
from bootstrap.lab.simulated_swarm.swarm_scenario import SwarmScenario
from bootstrap.lab.simulated_swarm.swarm_world import simulate_swarm
from node.watch.words import print_wrapped
from protocol.errors import DONE, NO


def run_scenario(scenario: SwarmScenario, is_json: bool, page: Path | None) -> int:
    """Return the exit code: 1, with a sentence for each bound that is broken. Raises `StateError` for the page."""
    minutes, began = scenario.run.minutes, time.process_time()
    with bars() as shown:

        def tell(done: float) -> None:
            shown.update("virtual minutes", int(done), max(1, int(minutes)))

        world = simulate_swarm(scenario, tell=tell)
    seconds = time.process_time() - began
    outcome = SwarmOutcome.of(world)
    checks = checks_of(world, outcome)
    if is_json:
        print(as_json(outcome, checks, seconds))
    else:
        show(outcome, checks, seconds)
    if page is not None:
        write_page(page, world, outcome, checks)
    for check in broken(checks):
        print_wrapped(check.sentence, on_error=True)
    return NO if broken(checks) else DONE
