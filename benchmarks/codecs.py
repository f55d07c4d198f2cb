"""What the codecs of activations and gradients cost: time against a plain copy, bytes, and error.

A tensor [8, 512, 1024] in float32, as the activations of eight sequences of 512 tokens, is encoded and decoded in
each codec; both are told as a multiple of what `tensor.clone()` takes. All take turns within each repeat, and medians
count. It is the processor time of the one thread they run on, for that is disturbed less by other work than seconds
are. Freed memory is kept, as in the daemon. Decoding starts from bytes in memory that can be written to, as they come
from the network: fp32 and bf16 are then no work until they are used, so decoding includes making a float32 tensor of
its own of them. The errors are root mean squares by that of the tensor, on Gaussian values and on heavy-tailed ones
(Student's t, three degrees of freedom).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, get_args

import numpy as np
import torch
from reporting.report import Report, arguments_of, parser_of, run
from torch import Tensor

from node.machine.limits import keep_freed_memory
from protocol.codecs import kernels
from protocol.codecs.codec import TensorSpec, as_read, decode, encode
from protocol.run.manifest import BoundaryCodec

SHAPE = (8, 512, 1024)
CODECS = [codec for codec in get_args(BoundaryCodec) if codec != "fp16"]
HEAVY = 3  # degrees of freedom: the fourth moment is infinite


def seconds(work: Callable[[], object]) -> float:
    """Of processor time."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def turns(values: Tensor, codecs: list[str], repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat: of "clone", and of each codec's encode and decode."""
    works: dict[str, Callable[[], object]] = {"clone": values.clone}
    for codec in codecs:
        encoded = encode(values, codec)
        spec = TensorSpec(codec, encoded.shape, encoded.nbytes)
        received = bytearray(b"".join(encoded.buffers))
        works[f"{codec}_encode"] = lambda codec=codec: encode(values, codec)
        works[f"{codec}_decode"] = lambda spec=spec, data=received: decoded(spec, data)
    for work in works.values():  # compiles, and takes the memory
        work()
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            taken[name].append(seconds(work))
    return taken


def decoded(spec: TensorSpec, data: bytearray) -> Tensor:
    """Float32 in memory of its own."""
    tensor = decode(spec, data)
    return tensor.clone() if spec.codec == "fp32" else tensor.to(torch.float32)


def relative_error(values: Tensor, codec: str) -> float:
    read = as_read(encode(values, codec)).double()
    return float((read - values).norm() / values.double().norm())


def samples(seed: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    return (
        torch.from_numpy(rng.standard_normal(SHAPE, np.float32)),
        torch.from_numpy(rng.standard_t(HEAVY, SHAPE).astype(np.float32)),
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="at least five")
    parser.add_argument("--seed", type=int, default=0)
    arguments = arguments_of(parser, repeats=5)
    report = Report("codecs", arguments.json)
    torch.set_num_threads(1)
    keep_freed_memory()
    kernels.load()
    gaussian, heavy = samples(arguments.seed)
    taken = turns(gaussian, CODECS, max(5, arguments.repeats))
    times = {name: median(values) for name, values in taken.items()}
    results: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for codec in CODECS:
        row: dict[str, Any] = {
            "codec": codec,
            "bytes_per_value": encode(gaussian, codec).nbytes / gaussian.numel(),
        }
        for way in ("encode", "decode"):
            ratio = times[f"{codec}_{way}"] / times["clone"]
            ratios[f"{codec}_{way}_vs_clone"] = round(ratio, 3)
            row[f"{way}_gigabytes_per_second"] = round(gaussian.nbytes / times[f"{codec}_{way}"] / 1e9, 2)
            row[f"{way}_vs_clone"] = round(ratio, 3)
        row["error_gaussian"] = float(f"{relative_error(gaussian, codec):.3g}")
        row["error_heavy"] = float(f"{relative_error(heavy, codec):.3g}")
        results.append(row)
        report.tell_row(row)
    report.conclude(ratios, results)


if __name__ == "__main__":
    run(main)
