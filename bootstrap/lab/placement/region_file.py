"""The form of a scenario for thousands of devices: links between regions, not between devices.

    {"region_names": [R names], "region_latency_ms": [R × R], "region_bandwidth_gbps": [R × R], "regions": [a name for
     each of N devices], …}

and "line_gbps" (of each device's own line), where known; the rest as in the other form. The diagonals say what two
devices of one region have. A link is as fast as the slowest of two lines and what lies between. 10,000 devices are
some 200 kB, where the other form would need 100 million numbers twice.

Above `MAX_DEVICES` nobody looks at single devices any more: those of one region that are alike become clusters, some
`CLUSTERS` in all, and what is planned is which stage takes which cluster. A cluster's links are the mean of its
members', so one among them that is much faster, and is sent more, counts for less than it will cost.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bootstrap.lab.placement.kernels import Floats, Integers
from protocol.errors import ScenarioError

MAX_DEVICES = 1024  # planned for one by one
MAX_IN_REGIONS = 100_000
MAX_REGIONS = 256
CLUSTERS = 256
LOOKED_AT = 8  # devices of a cluster, for its mean link: they are neighbours in speed
LISTS = ("throughput", "memory_bytes")  # of numbers, one for each device

Members = tuple[tuple[int, ...], ...]  # the devices of each cluster


def by_device(contents: Mapping[str, object]) -> tuple[dict[str, object], Members]:
    """The scenario with links between devices, or between clusters, whose members come with it.

    Raises `ScenarioError`.
    """
    names, region = _regions(contents)
    lines = _numbers(contents, "line_gbps", len(region))
    latency, bandwidth = (
        _square(contents, key, len(names)) for key in ("region_latency_ms", "region_bandwidth_gbps")
    )
    if lines is None:
        lines = np.full(len(region), np.inf)
    members: Members = ()
    expanded = {key: value for key, value in contents.items() if key not in ("line_gbps", "devices", *LISTS)}
    if len(region) > MAX_DEVICES:
        for key in ("may_serve", "coordinates"):
            if expanded.pop(key, None) is not None and key == "may_serve":
                raise ScenarioError(f"may_serve is for up to {MAX_DEVICES} devices: leave it out.")
        members = _clusters(region, lines, _numbers(contents, "throughput", len(region)))
    own: Members = members or tuple((device,) for device in range(len(region)))
    first = np.array([devices[0] for devices in own])
    expanded["regions"] = [names[region[device]] for device in first]
    expanded["latency_ms"] = latency[np.ix_(region[first], region[first])].tolist()
    expanded["bandwidth_gbps"] = _speeds(bandwidth, region, lines, own).tolist()
    for key in LISTS:
        if (values := _numbers(contents, key, len(region))) is not None:
            together = sum if key == "throughput" else min
            expanded[key] = [float(together(values[list(devices)])) for devices in own]
    return expanded, members


def _regions(contents: Mapping[str, object]) -> tuple[list[str], Integers]:
    """The regions' names, and the number of each device's region [N]."""
    names, regions = contents.get("region_names"), contents.get("regions")
    if not isinstance(names, list) or not 1 <= len(names) <= MAX_REGIONS:
        raise ScenarioError(f"region_names is not a list of 1 to {MAX_REGIONS} names.")
    if not isinstance(regions, list) or not 2 <= len(regions) <= MAX_IN_REGIONS:
        raise ScenarioError(f"regions is not a list of a name for each of 2 to {MAX_IN_REGIONS:,} devices.")
    number = {str(name): place for place, name in enumerate(names)}
    for device, name in enumerate(regions):
        if str(name) not in number:
            raise ScenarioError(f"regions[{device}] is {str(name)[:50]!r}, which is not among region_names.")
    return list(number), np.array([number[str(name)] for name in regions], np.int64)


def _square(contents: Mapping[str, object], key: str, count: int) -> Floats:
    """The matrix [R, R], the mean of both directions."""
    rows = contents.get(key)
    if not isinstance(rows, list) or len(rows) != count:
        raise ScenarioError(f"{key} is not a list of {count} rows, one for each of region_names.")
    matrix = np.array([_finite(row, f"{key}[{number}]", count) for number, row in enumerate(rows)])
    if key == "region_bandwidth_gbps" and not (matrix > 0).all():
        raise ScenarioError(f"{key} has a zero: give what two devices of these regions reach.")
    mean: Floats = (matrix + matrix.T) / 2
    return mean


def _numbers(contents: Mapping[str, object], key: str, count: int) -> Floats | None:
    values = contents.get(key)
    if values is None:
        return None
    numbers = np.array(_finite(values, key, count))
    if key == "line_gbps" and not (numbers > 0).all():
        raise ScenarioError(f"{key} has a zero: leave that device out.")
    return numbers


def _finite(values: object, place: str, count: int) -> list[float]:
    """`count` numbers of at least 0."""
    if not isinstance(values, list) or len(values) != count:
        raise ScenarioError(f"{place} is not a list of {count} entries.")
    for number, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e18:
            raise ScenarioError(f"{place}[{number}] is not a number of at least 0.")
    return [float(value) for value in values]


def _clusters(region: Integers, lines: Floats, throughput: Floats | None) -> Members:
    """Some `CLUSTERS` of nearly equal size, each of one region and of neighbours in speed, the line's first."""
    own_speed = np.zeros_like(lines) if throughput is None else throughput
    size = len(region) / CLUSTERS
    found: list[tuple[int, ...]] = []
    for number in range(int(region.max()) + 1):
        devices = np.flatnonzero(region == number)
        devices = devices[np.lexsort((own_speed[devices], lines[devices]))]
        if devices.size:
            parts = np.array_split(devices, max(1, round(devices.size / size)))
            found += [tuple(part.tolist()) for part in parts]
    return tuple(found)


def _speeds(bandwidth: Floats, region: Integers, lines: Floats, own: Members) -> Floats:
    """[C, C] Gbit/s between two clusters: what gives the mean time of a transfer between members of the two."""
    looked_at = np.array(
        [[devices[i * len(devices) // LOOKED_AT] for i in range(LOOKED_AT)] for devices in own]
        if any(len(devices) > 1 for devices in own)
        else own
    )
    first = looked_at[:, 0]
    between = bandwidth[np.ix_(region[first], region[first])]
    slowness = np.zeros_like(between)
    for a in range(looked_at.shape[1]):
        for b in range(looked_at.shape[1]):
            line = np.minimum(lines[looked_at[:, a]][:, None], lines[looked_at[:, b]][None, :])
            slowness += 1 / np.minimum(between, line)
    speeds: Floats = looked_at.shape[1] ** 2 / slowness
    return speeds
