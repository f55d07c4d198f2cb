"""What `noloco manifest check --measure` promises of four links beside what a real swarm trains on them.

Two of the links are wide enough for what two cores compute, one of them with a narrower uplink; two are full, again
one with a narrower uplink. Before and after each swarm of one replica of each stage the command itself measures the
machine, in as many processes at once as there are stages, since these share its cores: the promise is the mean of
both times, of the slowest process. What limited is the busiest part of the swarm: a stage's compute thread or one
direction of a stage's link, by the share of time or of bandwidth that it was used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from pipelines.chain import Chain, ChainFailed
from shaping.links import Shape, ShapedLinks

from bootstrap.checking.costs import Limit
from protocol.run.manifest import Manifest, as_toml

FOUR = (
    Shape(100.0, 0.02),
    Shape(300.0, 0.02, uplink=60.0),
    Shape(10.0, 0.02),
    Shape(40.0, 0.02, uplink=6.0),
)
CHECK_SECONDS = 300.0  # that the command may take; it takes ten
WARM_UP_STEPS = 1


@dataclass(frozen=True)
class Promise:
    tokens_per_second: float
    limit: str


def compared(manifest: Manifest, shape: Shape, repeats: int) -> dict[str, Any]:
    """One row: a swarm on such links for `repeats` steps, and what is promised before and after it."""
    before, load = promised_here(manifest, shape), os.getloadavg()[0]
    row = trained(manifest, shape, repeats)
    after = promised_here(manifest, shape)
    promises = [before.tokens_per_second, after.tokens_per_second]
    row |= {"promised": round(mean(promises)), "before_after": [round(each) for each in promises]}
    row |= {"ratio": round(mean(promises) / row["measured"], 3), "load": round(load, 1)}
    return row | {"limit_promised": min(before, after, key=lambda each: each.tokens_per_second).limit}


def promised_here(manifest: Manifest, shape: Shape) -> Promise:
    """What the command says of this machine behind such links, as busy as the stages make it."""
    with tempfile.TemporaryDirectory(prefix="noloco-bench-") as folder:
        file = Path(folder, "manifest.toml")
        file.write_text(as_toml(manifest))
        command = [
            sys.executable, "-m", "bootstrap.tools_cli", "manifest", "check", str(file), "--json", "--measure",
            "--threads", "1", "--replicas", "1", "--latency-ms", f"{shape.one_way * 1e3:g}",
            "--uplink", f"{shape.up:g}Mbit", "--downlink", f"{shape.mbit:g}Mbit",
        ]  # fmt: skip
        checks = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(manifest.stages)
        ]
        answers = [check.communicate(timeout=CHECK_SECONDS)[0] for check in checks]
    if any(check.returncode for check in checks):
        raise ChainFailed("noloco manifest check failed; its error is above")
    costs = [json.loads(answer)["devices"][0]["cost"] for answer in answers]
    slowest = min(costs, key=lambda cost: float(cost["tokens_per_second"]))
    return Promise(slowest["tokens_per_second"], slowest["limit"])


def trained(manifest: Manifest, shape: Shape, repeats: int) -> dict[str, Any]:
    """Tokens a second on such links, the median of `repeats` steps, and how busy each part was."""
    peers = manifest.stages + 1
    with ShapedLinks(peers, shape) as links:
        places = [(links.address(peer), links.prefix(peer)) for peer in range(peers)]
        with Chain(manifest, places) as chain:
            chain.wait_for_steps(WARM_UP_STEPS)
            first, carried = len(chain.step_times()), [links.carried(peer) for peer in range(1, peers)]
            chain.wait_for_steps(first + repeats + 1)
            times = chain.step_times()
            since = [
                [now - then for now, then in zip(links.carried(peer), carried[peer - 1], strict=True)]
                for peer in range(1, peers)
            ]
            last = len(times) - 1
            computing = [chain.share_computed(stage, first, last) for stage in range(manifest.stages)]
    tokens = manifest.inner.microbatches * manifest.tokens_per_microbatch
    seconds = times[last] - times[first - 1]
    speeds = [tokens / (end - begin) for begin, end in zip(times[first:], times[first + 1 :], strict=False)]
    busy = {
        Limit.COMPUTE: max(computing),
        Limit.UPLINK: max(up for up, _ in since) * 8e-6 / seconds / shape.up,
        Limit.DOWNLINK: max(down for _, down in since) * 8e-6 / seconds / shape.mbit,
    }
    return {
        "up_mbit": shape.up,
        "down_mbit": shape.mbit,
        "measured": round(median(speeds)),
        "of_each_step": [round(speed) for speed in speeds],
        "busy": [round(share, 2) for share in busy.values()],
        "limit_seen": max(busy, key=lambda part: busy[part]).value,
    }
