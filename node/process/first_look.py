"""A short look at the machine when a node starts; `noloco doctor` looks longer."""

from __future__ import annotations

from collections.abc import Sequence

from node.machine.checkup import OUTSIDE, CheckResult
from node.watch.events import Events
from protocol.records.addresses import host_of


def towards(join: Sequence[str]) -> str:
    """The host to find the interface towards: the first that is known by its number, else one on the internet."""
    known = [host for address in join if (host := host_of(address)) is not None]
    return str(known[0]) if known else OUTSIDE


def tell_of_machine(events: Events, found: Sequence[CheckResult]) -> None:
    """Say in one line what was found, and warn of each finding that is not well."""
    well = [finding.brief for finding in found if finding.is_well is not False and finding.brief]
    events.say(f"This machine has {', '.join(well)}.", "machine", found=well)
    for finding in found:
        if finding.is_well is False:
            events.warn(f"Not well: {finding.what}. {finding.told}", "not-well", what=finding.what)
