"""`noloco links`: what the nodes know of their links, as matrices, a table, and a scenario for `noloco plan`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bootstrap.display import plain_table, write_whole
from bootstrap.inspect.observer import Sighting, visit
from node.model.stage import parameter_count
from node.watch.words import called_among, print_wrapped
from protocol.codecs.codec import nbytes_of
from protocol.ground import PeerId
from protocol.records.announcement import PEER_CHARACTERS, LinkReport
from protocol.run.manifest import Manifest

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class MappedNode:
    """One node and what it says of itself; `throughput` in microbatches per second, NaN when it is not told."""

    peer: PeerId
    stage: int
    links: Sequence[LinkReport]
    throughput: float = math.nan
    name: str = ""  # as its volunteer gave it


@dataclass(frozen=True)
class LinkMap:
    """N peers, by stage and id. NaN where nobody has measured, the diagonals among it.

    `latency_s` [N, N] one way, the same both ways. `bandwidth` [N, N] in bytes per second, from the row's peer to
    the column's; `uncertainty` [N, N]: the standard deviation of its logarithm. `throughput` [N]: see `MappedNode`.
    """

    peers: tuple[PeerId, ...]
    stages: tuple[int, ...]
    latency_s: Floats
    bandwidth: Floats
    uncertainty: Floats
    throughput: Floats
    names: tuple[str, ...]  # of the peers, as their volunteers gave them

    @property
    def called(self) -> tuple[str, ...]:
        """The peers' names for people, see `called_among`."""
        named = list(zip(self.peers, self.names, strict=True))
        return tuple(called_among(named, peer) for peer in self.peers)

    @property
    def measured(self) -> int:
        """Pairs of peers whose latency and bandwidth, one way at least, are known."""
        known = ~np.isnan(self.latency_s) & ~(np.isnan(self.bandwidth) & np.isnan(self.bandwidth.T))
        return int(known.sum()) // 2

    @property
    def pairs(self) -> int:
        return len(self.peers) * (len(self.peers) - 1) // 2


def link_map(nodes: Iterable[MappedNode]) -> LinkMap:
    """Map the links between `nodes`; reports of other peers are left out.

    Of two reports of a round trip the longer one counts: a peer that claims to be near others is then believed
    only by those who find so themselves.
    """
    order = sorted(nodes, key=lambda node: (node.stage, node.peer))
    index = {node.peer[-PEER_CHARACTERS:]: i for i, node in enumerate(order)}
    latency, bandwidth, uncertainty = (np.full((len(order), len(order)), math.nan) for _ in range(3))
    for i, node in enumerate(order):
        for report in node.links:
            j = index.get(report.peer, i)
            if j == i:
                continue
            latency[i, j] = report.round_trip / 2
            if report.bandwidth is not None:
                bandwidth[i, j], uncertainty[i, j] = report.bandwidth, report.uncertainty
    return LinkMap(
        peers=tuple(node.peer for node in order),
        stages=tuple(node.stage for node in order),
        latency_s=np.fmax(latency, latency.T),
        bandwidth=bandwidth,
        uncertainty=uncertainty,
        throughput=np.array([node.throughput for node in order]),
        names=tuple(node.name for node in order),
    )


def seen_from_outside(sightings: Iterable[Sighting], manifest: Manifest) -> list[MappedNode]:
    """The nodes with all their links where they answered, with those in their records where they did not."""
    seen = []
    for sighting in sightings:
        member, stats = sighting.member, sighting.stats
        said = member.announcement
        if stats is None:
            seen.append(MappedNode(member.peer, said.stage, said.links, name=said.name))
            continue
        busy, rate = stats.recent_compute_fraction, stats.tokens_per_second
        # microbatches a second if it computed all the time
        throughput = rate / manifest.tokens_per_microbatch / busy if busy and rate > 0 else math.nan
        seen.append(MappedNode(member.peer, said.stage, stats.links, throughput, said.name))
    return seen


def scenario_of(links: LinkMap, manifest: Manifest) -> dict[str, object]:
    """A scenario for `noloco plan` as JSON: ms one way, Gbit/s, null where nobody has measured. The largest stage
    gives the bytes of a round.

    "throughput" is there only when all nodes tell theirs; it holds for the stages that they serve now.
    """
    parameters = max(parameter_count(manifest, stage) for stage in range(manifest.stages))
    activations = (manifest.inner.sequences, manifest.data.sequence_tokens, manifest.model.hidden_size)
    scenario: dict[str, object] = {
        "name": f"run '{manifest.name}', as measured by its nodes",
        "note": "Latency one way in ms, bandwidth in Gbit/s from the row's peer, diagonal unused, null: not "
        "measured. Volumes: one gossip exchange of the largest stage, activations of one inner step.",
        "devices": len(links.peers),
        "peers": list(links.peers),
        "stages": list(links.stages),
        "volumes": {
            "data_parallel_bytes": nbytes_of(
                manifest.wire.gossip, [-(-parameters // manifest.outer.fragments)]
            ),
            "pipeline_bytes": manifest.inner.microbatches * nbytes_of(manifest.wire.activations, activations),
        },
        "latency_ms": _rows(links.latency_s * 1e3),
        "bandwidth_gbps": _rows(links.bandwidth * 8e-9),
    }
    if not np.isnan(links.throughput).any():
        scenario["throughput"] = [float(f"{value:.6g}") for value in links.throughput]
    return scenario


def _rows(matrix: Floats) -> list[list[float | None]]:
    """The values with six digits, None where nobody measured; 0 on the diagonal."""
    rows = [[None if math.isnan(x) else float(f"{x:.6g}") for x in row] for row in matrix.tolist()]
    for i, row in enumerate(rows):
        row[i] = 0.0
    return rows


async def show_links(join: list[str], token: str, out: Path | None) -> None:
    """Print a running swarm's links; with `out`, also write them as a scenario.

    Raises `JoinError` when nobody answers, `StateError` when `out` cannot be written.
    """
    async with visit(join, token) as observer:
        manifest = observer.manifest
        found = link_map(seen_from_outside(await observer.survey(), manifest))
        Console(markup=False).print(table_of(found, manifest.name))
        if out is not None:
            write_scenario(out, scenario_of(found, manifest))
            print_wrapped(
                f"Wrote {out}. Plan with:\n  noloco plan --scenario {out} --stages {manifest.stages}"
            )


def write_scenario(file: Path, scenario: dict[str, object]) -> None:
    """Write a scenario as JSON. Raises `StateError` when the file cannot be written."""
    write_whole(file, json.dumps(scenario), "Name another --out.")


def table_of(found: LinkMap, name: str) -> Table:
    """A line for each node: medians over its links that were measured, and its nearest peer."""
    table = plain_table(
        f"run '{name}'  {found.measured} of {found.pairs} pairs measured",
        ("node", "stage", "links", "latency ms", "nearest", "ms", "up Mbit/s", "±"),
        left=("node", "nearest"),
        is_dense=True,
    )
    names = found.called
    for i, name in enumerate(names):
        latency = found.latency_s[i] * 1e3
        known = np.flatnonzero(~np.isnan(latency))
        nearest = min(known, key=latency.__getitem__, default=i)
        of_nearest = ("-", "-") if nearest == i else (names[nearest], f"{latency[nearest]:.1f}")
        medians = (_median(found.bandwidth[i] * 8e-6, ".1f"), _median(found.uncertainty[i], ".0%"))
        shown = (name, str(found.stages[i]), str(len(known)), _median(latency, ".1f"))
        table.add_row(*shown, *of_nearest, *medians)
    return table


def _median(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]], form: str) -> str:
    """The median as text; a dash when nothing was measured."""
    known = values[~np.isnan(values)]
    return format(float(np.median(known)), form) if len(known) else "-"
