"""A scenario: devices, and what was measured of the links between them.

A JSON file, latencies one way in ms and bandwidths in Gbit/s, as square matrices whose diagonal is not used:

    {"name": …, "devices": N, "latency_ms": [[…]…], "bandwidth_gbps": [[…]…],
     "volumes": {"data_parallel_bytes": …, "pipeline_bytes": …}}

and, where known: "regions" (a name for each device), "coordinates" ([latitude, longitude] of each), "throughput"
(microbatches per second, forward and backward), "memory_bytes", "stage_memory_bytes" (a number, or one for each
stage), "may_serve" (for each device the stages that it can take), "site_uplink_gbps" ({region: shared uplink}). A
link that nobody measured is null, and is estimated from the others (see `completion`). With "region_latency_ms" it
is the form for thousands of devices (see `region_file`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bootstrap.lab.placement.completion import complete_bandwidth, complete_latency
from bootstrap.lab.placement.kernels import Floats, Integers
from bootstrap.lab.placement.region_file import MAX_DEVICES, Members, by_device
from node.machine.limits import optional
from protocol.errors import ScenarioError

connected_components = optional("scipy.sparse.csgraph", "lab").connected_components

MAX_BYTES = 64 * 2**20  # of a file; 1,000 devices take some 20 MB


@dataclass(frozen=True)
class Scenario:
    """N devices. `latency` [N, N] in seconds one way, `bandwidth` [N, N] in bit/s, symmetric; volumes in bytes.

    The diagonals are 0 and infinite, so that a device reaches itself in no time. `throughput` [N] in microbatches
    per second, or None: computing is then left out of every time. `site` [N]: which shared uplink a device is
    behind, −1 for none; `uplinks`: their bit/s.
    """

    name: str
    latency: Floats
    bandwidth: Floats
    data_parallel_bytes: float
    pipeline_bytes: float
    regions: tuple[str, ...] = ()
    coordinates: Floats | None = None
    throughput: Floats | None = None
    memory: Floats | None = None
    stage_memory: tuple[float, ...] = ()  # one for all stages, or one for each
    may_serve: tuple[frozenset[int], ...] = ()  # of each device; empty: any
    site: Integers | None = None
    uplinks: Floats | None = None
    estimated: int = 0  # pairs of devices whose link was not measured
    # for thousands of devices: of how many each of the N here is a cluster, and of which; then `throughput` is theirs
    # together and `memory` the least
    members: Members = ()

    @property
    def devices(self) -> int:
        return len(self.latency)

    def single(self, chosen: Iterable[int]) -> list[int]:
        """The single devices that these are."""
        if not self.members:
            return sorted(chosen)
        return sorted(device for cluster in chosen for device in self.members[cluster])

    def transfer(self, nbytes: float) -> Floats:
        """[N, N] seconds for `nbytes` over each link: t = α + 8c/β; 0 on the diagonal."""
        times: Floats = self.latency + 8 * nbytes / self.bandwidth
        return times


def read_scenario(file: Path) -> Scenario:
    """Read a scenario's file. Raises `ScenarioError` that names what is wrong, and where."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ScenarioError(f"{file} is larger than {MAX_BYTES // 2**20} MiB: give fewer devices.")
        contents = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ScenarioError(f"Cannot read {file} ({error.strerror}). Give --scenario a JSON file.") from None
    except UnicodeDecodeError:
        raise ScenarioError(f"{file} is not a text file. Give --scenario a JSON file.") from None
    except (ValueError, RecursionError) as error:
        raise ScenarioError(f"{file} is not JSON: {str(error)[:100]}. Correct that place.") from None
    return scenario_from(contents)


def scenario_from(contents: object) -> Scenario:
    """A scenario from what stands in its file. Raises `ScenarioError` that names what is wrong, and where."""
    if not isinstance(contents, dict):
        raise ScenarioError("A scenario is a JSON object with latency_ms and bandwidth_gbps: give both.")
    members: Members = ()
    if "region_latency_ms" in contents:
        contents, members = by_device(contents)
    latency, bandwidth, estimated = _links(contents)
    count = len(latency)
    volumes = contents.get("volumes")
    if not isinstance(volumes, dict):
        raise ScenarioError("volumes is missing: give data_parallel_bytes and pipeline_bytes in it.")
    regions = contents.get("regions", [])
    if not isinstance(regions, list) or len(regions) not in (0, count):
        raise ScenarioError(f"regions is not a list of {count} names, one for each device.")
    regions = tuple(str(region)[:100] for region in regions)
    site, uplinks = _uplinks(contents.get("site_uplink_gbps"), regions)
    return Scenario(
        name=str(contents.get("name", "unnamed"))[:200],
        latency=latency,
        bandwidth=bandwidth,
        data_parallel_bytes=_number(volumes.get("data_parallel_bytes"), "volumes.data_parallel_bytes"),
        pipeline_bytes=_number(volumes.get("pipeline_bytes"), "volumes.pipeline_bytes"),
        regions=regions,
        coordinates=_coordinates(contents, count),
        throughput=_numbers(contents, "throughput", count, above=True),
        memory=_numbers(contents, "memory_bytes", count),
        stage_memory=_stage_memory(contents.get("stage_memory_bytes")),
        may_serve=_may_serve(contents.get("may_serve"), count),
        site=site,
        uplinks=uplinks,
        estimated=estimated,
        members=members,
    )


def _links(contents: Mapping[str, object]) -> tuple[Floats, Floats, int]:
    """Complete latencies in seconds and bandwidths in bit/s, and how many pairs were not measured."""
    latency, bandwidth = _matrix(contents, "latency_ms") / 1e3, _matrix(contents, "bandwidth_gbps") * 1e9
    count = len(latency)
    if len(bandwidth) != count:
        raise ScenarioError(
            f"latency_ms has {count} rows, bandwidth_gbps {len(bandwidth)}: give both one size."
        )
    if contents.get("devices", count) != count:
        raise ScenarioError(
            f"devices is {_shown(contents['devices'])}, but latency_ms has {count} rows: correct one."
        )
    for row, column in np.argwhere((bandwidth == 0) & ~np.eye(count, dtype=bool))[:1]:
        raise ScenarioError(
            f"bandwidth_gbps[{row}][{column}] is zero: these devices cannot reach each other. Leave one out, or "
            "give null if it was not measured."
        )
    latency, bandwidth = _both_directions(latency), _both_directions(bandwidth)
    np.fill_diagonal(latency, 0.0)
    np.fill_diagonal(bandwidth, 1.0)
    unknown = np.isnan(latency) | np.isnan(bandwidth)
    islands, island = connected_components(~unknown, directed=False)
    if islands > 1:
        other = int(np.flatnonzero(island != island[0])[0])
        raise ScenarioError(
            f"No chain of measured links leads from device 0 to device {other}: measure one, or leave one out."
        )
    latency = complete_latency(latency)
    bandwidth = complete_bandwidth(bandwidth, latency)
    np.fill_diagonal(bandwidth, np.inf)
    return latency, bandwidth, int(unknown.sum()) // 2


def _matrix(contents: Mapping[str, object], name: str) -> Floats:
    """The matrix [N, N]; NaN where the file says null."""
    rows = contents.get(name)
    if not isinstance(rows, list) or not rows:
        raise ScenarioError(f"{name} is missing: give a square matrix, a list of rows.")
    count = len(rows)
    if count > MAX_DEVICES:
        raise ScenarioError(f"{name} has {count} rows: at most {MAX_DEVICES} devices are planned for.")
    if count < 2:
        raise ScenarioError(f"{name} has one row: a plan needs two devices at least.")
    matrix = np.full((count, count), np.nan)
    for i, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != count:
            length = f"has {len(row)} entries" if isinstance(row, list) else "is not a list"
            raise ScenarioError(f"{name}[{i}] {length}: the matrix has {count} rows and must be square.")
        for j, value in enumerate(row):
            if value is not None:
                matrix[i, j] = _number(value, f"{name}[{i}][{j}]")
    return matrix


def _both_directions(matrix: Floats) -> Floats:
    """The mean of the two directions; the one that was measured, where only one was."""
    mean = (matrix + matrix.T) / 2
    known: Floats = np.where(np.isnan(matrix), matrix.T, np.where(np.isnan(matrix.T), matrix, mean))
    return known


def _stage_memory(needed: object) -> tuple[float, ...]:
    values = [] if needed is None else needed if isinstance(needed, list) else [needed]
    return tuple(_number(value, f"stage_memory_bytes[{i}]") for i, value in enumerate(values))


def _may_serve(rows: object, count: int) -> tuple[frozenset[int], ...]:
    """Stage numbers of each device."""
    found = []
    for i, row in enumerate(() if rows is None else _list(rows, "may_serve", count)):
        if not isinstance(row, list) or not row or len(row) > MAX_DEVICES:
            raise ScenarioError(f"may_serve[{i}] is not a list of stages, one at least.")
        stages = [_number(stage, f"may_serve[{i}][{j}]") for j, stage in enumerate(row)]
        if any(not stage.is_integer() for stage in stages):
            raise ScenarioError(f"may_serve[{i}] has a number that is no stage.")
        found.append(frozenset(int(stage) for stage in stages))
    return tuple(found)


def _uplinks(uplinks: object, regions: tuple[str, ...]) -> tuple[Integers | None, Floats | None]:
    """The uplink that each device is behind, −1 for none, and the bit/s of each uplink."""
    if uplinks is None:
        return None, None
    if not isinstance(uplinks, dict) or not uplinks:
        raise ScenarioError("site_uplink_gbps is not an object of a region's name and its uplink in Gbit/s.")
    for name in uplinks:
        if name not in regions:
            raise ScenarioError(f"site_uplink_gbps names {name[:50]!r}, which is not among regions.")
    names = list(uplinks)
    speeds = [_number(uplinks[name], f"site_uplink_gbps.{name[:50]}", above=True) * 1e9 for name in names]
    site = [names.index(region) if region in uplinks else -1 for region in regions]
    return np.array(site, np.int64), np.array(speeds)


def _list(values: object, name: str, count: int) -> list[object]:
    if not isinstance(values, list) or len(values) != count:
        raise ScenarioError(f"{name} is not a list of {count} entries.")
    return values


def _numbers(contents: Mapping[str, object], name: str, count: int, above: bool = False) -> Floats | None:
    if contents.get(name) is None:
        return None
    values = _list(contents[name], name, count)
    return np.array([_number(value, f"{name}[{i}]", above=above) for i, value in enumerate(values)])


def _coordinates(contents: Mapping[str, object], count: int) -> Floats | None:
    """The latitudes and longitudes [N, 2], None where they are not known."""
    if contents.get("coordinates") is None:
        return None
    pairs = [
        _list(row, f"coordinates[{i}]", 2)
        for i, row in enumerate(_list(contents["coordinates"], "coordinates", count))
    ]
    return np.array(
        [
            [_number(value, f"coordinates[{i}][{j}]", least=-360.0) for j, value in enumerate(pair)]
            for i, pair in enumerate(pairs)
        ]
    )


def _number(value: object, place: str, least: float = 0.0, above: bool = False) -> float:
    """A finite number of at least `least`, or above it. Raises `ScenarioError` that names the place."""
    if value is None:
        raise ScenarioError(f"{place} is missing: give a number.")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ScenarioError(f"{place} is {_shown(value)}: give a number.")
    if not abs(value) <= 1e18:  # NaN, infinite, or beyond anything that is measured
        raise ScenarioError(f"{place} is {_shown(value)}: give a finite number.")
    if value < least:
        what = "negative" if least == 0 else _shown(value)
        raise ScenarioError(f"{place} is {what}: give a number of at least {least:g}.")
    if above and value == least:
        raise ScenarioError(f"{place} is zero: give a number above it.")
    return float(value)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "too large"
    return text if len(text) <= 40 else f"{text[:37]}..."
