"""Devices that a command line names; and this machine, measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from node.machine.devices import DEVICES, GB, Device, Timed, watts_of
from protocol.errors import UserError

if TYPE_CHECKING:  # names of devices are needed before a command imports torch
    import torch

    from node.model.passes import Passes
    from protocol.run.manifest import Manifest

MEASURED_TOKENS = 256  # in a layer at first; then as many of a microbatch's as
MOST_SECONDS = 1.0  # a layer may take
LEAST_SECONDS = 0.5  # of runs behind a mean
HARMLESS_STD = 0.02  # of the weights that are timed: with a checkpoint's own a loss may not be finite


def named(names: str) -> list[Device]:
    """The devices of "a100,4090". Raises `UserError` for an unknown name."""
    devices = []
    for name in filter(None, (part.strip().lower() for part in names.split(","))):
        if name not in DEVICES:
            raise UserError(f"The device {name!r} is unknown. Known devices: {', '.join(DEVICES)}.")
        devices.append(DEVICES[name])
    return devices


def measured_here(manifest: Manifest, threads: int = 0) -> Device:
    """This machine as it is now: a layer, the head, a codec and a pass over memory are timed. Takes seconds.

    `threads` of torch, as a node's; 0: as many as a node takes. They are torch's from then on.
    """
    import torch

    from node.machine.cores import cores
    from node.model.resources import room_on
    from node.model.stage import work_of

    torch.set_num_threads(threads or min(torch.get_num_threads(), cores()))
    cuda = torch.cuda.is_available()
    where = torch.device("cuda" if cuda else "cpu")
    three = manifest.model.model_copy(update={"layers": 3, "init_std": HARMLESS_STD})
    piece = manifest.model_copy(update={"stages": 3, "model": three})
    piece = _in_time(piece, where)
    timed = _timed(piece, where)
    passes = torch.ones(2**26, device=where)  # what memory happens to hold may be slow to multiply
    bandwidth = 2 * passes.nbytes / _seconds(lambda: passes.mul_(1.0), where) / GB
    watts = watts_of(torch.cuda.get_device_name(where)) if cuda else 0.0
    tflops = 6 * work_of(piece, 1) / timed.layer / 1e12
    memory = room_on(where).free / GB
    return Device("here", tflops, bandwidth, memory, watts, is_gpu=cuda, efficiency=1.0, timed=timed)


def _in_time(piece: Manifest, where: torch.device) -> Manifest:
    """The manifest with microbatches as long as the run's, or of as many of its tokens as can be timed in seconds."""
    tokens = min(MEASURED_TOKENS, piece.data.sequence_tokens)
    short = _with_microbatches(piece, 1, tokens)
    each = _layer_seconds(short, where) / tokens
    affordable = max(tokens, int(MOST_SECONDS / each))
    if affordable < piece.data.sequence_tokens:
        return _with_microbatches(piece, 1, affordable)
    sequences = min(piece.inner.sequences, affordable // piece.data.sequence_tokens)
    return _with_microbatches(piece, sequences, piece.data.sequence_tokens)


def _with_microbatches(piece: Manifest, sequences: int, tokens: int) -> Manifest:
    inner = piece.inner.model_copy(update={"sequences": sequences})
    data = piece.data.model_copy(update={"sequence_tokens": tokens})
    return piece.model_copy(update={"inner": inner, "data": data})


def _timed(piece: Manifest, where: torch.device) -> Timed:
    import torch

    tokens = piece.tokens_per_microbatch
    layer = _layer_seconds(piece, where)
    head = _head_seconds(piece, where) - (0.0 if piece.is_ring else layer)
    encoding = 0.0
    if where.type == "cpu":  # a GPU encodes while it computes what comes next
        from protocol.codecs.codec import encode

        codecs = (piece.wire.activations, piece.wire.gradients)
        sent = torch.ones(piece.inner.sequences, piece.data.sequence_tokens, piece.model.hidden_size)
        encoding = sum(_seconds(partial(encode, sent, codec), where) for codec in codecs) / 2
    return Timed(layer / tokens, max(0.0, head) / tokens, encoding / tokens)


def _layer_seconds(piece: Manifest, where: torch.device) -> float:
    """Seconds of a microbatch in a layer, forward and backward."""
    import torch

    passes = _passes(piece, 1, where)
    inputs = torch.ones(piece.inner.sequences, piece.data.sequence_tokens, piece.model.hidden_size)

    def once() -> None:
        leaf, outputs = passes.forward(inputs.to(where))
        passes.backward(leaf, outputs, inputs)

    return _seconds(once, where)


def _head_seconds(piece: Manifest, where: torch.device) -> float:
    """Seconds of a microbatch in the stage with the head, in a ring of what comes back alone."""
    import torch

    passes = _passes(piece, piece.head_stage, where)
    shape = (piece.inner.sequences, piece.data.sequence_tokens)
    inputs = torch.ones(*shape, piece.model.hidden_size).to(where)
    labels = torch.zeros(shape, dtype=torch.long).to(where)
    if piece.is_ring:
        return _seconds(lambda: passes.head(inputs, labels, learns=True), where)
    return _seconds(lambda: passes.last_stage(inputs, labels), where)


def _passes(piece: Manifest, index: int, where: torch.device) -> Passes:
    """Those of a stage as a node computes it there, with weights that need not be a model's."""
    from node.machine.accelerator import has_bf16
    from node.model.execution import Execution
    from node.model.flat import FlatParameters
    from node.model.passes import Passes
    from node.model.stage import Stage

    stage = Stage(piece, index).to(where)
    FlatParameters(
        list(stage.named_parameters())
    )  # gradients as a node has them: of one piece, and never None
    passes = Passes(stage, where, {})
    passes.execute(Execution(precision="bf16" if has_bf16(where) else "fp32"))
    return passes


def _seconds(work: Callable[[], object], where: torch.device) -> float:
    """Seconds of one run, after one that warms up: the mean of three at least, and of half a second of them.

    The mean, not the fastest: what else the machine does takes its part of a run as well.
    """
    import torch

    def settled() -> float:
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        return time.perf_counter()

    work()
    began, runs = settled(), 0
    while runs < 3 or settled() - began < LEAST_SECONDS:
        work()
        runs += 1
    return (settled() - began) / runs
