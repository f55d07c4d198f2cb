"""Whether a node's memory stays flat: its resident size while thousands of microbatches pass.

Two `noloco-node` processes as they ship, each with its p2pd, train a small Llama with the way between them in the
default codec. Sampled each second: the resident memory of node and p2pd of each stage. The first tenth of the
microbatches is left out, in which buffers grow to what is needed. Ratios, for each stage: `stage0_highest` and
`stage0_lowest`, by the size at the end of the first tenth, and the same of p2pd as `p2pd0_…`.
"""

from __future__ import annotations

import time
from typing import Any

import psutil
from pipelines.chain import Chain, ChainFailed, manifest_of
from reporting.report import Report, arguments_of, parser_of, run

from protocol.run.manifest import Manifest

PLACES: list[tuple[str, list[str]]] = [("127.0.0.1", [])] * 3
SAMPLE_SECONDS = 1.0


def small_manifest() -> Manifest:
    """Microbatches of 2 × 128 tokens, so that many pass in little time."""
    manifest = manifest_of(128)
    model = manifest.model.model_copy(update={"layers": 2})
    inner = manifest.inner.model_copy(update={"sequences": 2})
    data = manifest.data.model_copy(update={"sequence_tokens": 128})
    return manifest.model_copy(update={"model": model, "inner": inner, "data": data})


def resident(chain: Chain) -> dict[str, float]:
    """Megabytes of each stage's node and p2pd."""
    sizes: dict[str, float] = {}
    for stage, pid in enumerate(chain.pids()[1:]):
        node = psutil.Process(pid)
        sizes[f"stage{stage}"] = node.memory_info().rss / 1e6
        sizes[f"p2pd{stage}"] = sum(child.memory_info().rss for child in node.children()) / 1e6
    return {name: round(size, 1) for name, size in sizes.items()}


def watch(microbatches: int, report: Report) -> list[dict[str, Any]]:
    manifest = small_manifest()
    samples: list[dict[str, Any]] = []
    with Chain(manifest, PLACES) as chain:
        chain.wait_for_steps(1)
        while not samples or samples[-1]["microbatches"] < microbatches:
            time.sleep(SAMPLE_SECONDS)
            chain.require_alive()
            done = len(chain.step_times()) * manifest.inner.microbatches
            samples.append({"microbatches": done, **resident(chain)})
            report.tell_row(samples[-1])
    return samples


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--microbatches", type=int, default=5_000)
    arguments = arguments_of(parser, microbatches=60)
    report = Report("memory", arguments.json)
    samples = watch(arguments.microbatches, report)
    settled = [row for row in samples if row["microbatches"] >= arguments.microbatches / 10]
    ratios = {}
    for name in ("stage0", "stage1", "p2pd0", "p2pd1"):
        sizes = [row[name] for row in settled]
        ratios[f"{name}_highest"] = round(max(sizes) / sizes[0], 3)
        ratios[f"{name}_lowest"] = round(min(sizes) / sizes[0], 3)
    report.conclude(ratios, samples)


if __name__ == "__main__":
    run(main, ChainFailed)
