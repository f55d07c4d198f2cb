"""What `noloco manifest check` promises for a link, of a machine whose speed without links was measured."""

from __future__ import annotations

from dataclasses import replace

from bootstrap.checking.costs import Limit, step_time
from bootstrap.checking.report import AssumedLinks
from node.machine.devices import Device
from protocol.run.manifest import Manifest

NO_LINK = AssumedLinks(1e6, 0.0)


def as_fast_as(manifest: Manifest, tokens_per_second: float) -> Device:
    """A processor on which a replica without links trains so many tokens a second."""
    device = Device("here", 1.0, 1e9, 1e3, is_gpu=False, efficiency=1.0)
    tokens = manifest.inner.microbatches * manifest.tokens_per_microbatch
    return replace(device, tflops=tokens_per_second * step_time(manifest, device, NO_LINK, 1).whole / tokens)


def promised(manifest: Manifest, unshaped: float, mbit: float, one_way_ms: float) -> tuple[float, Limit]:
    """Tokens a second of a replica behind such links, and what limits it; `unshaped` is what it trains without."""
    links = AssumedLinks(mbit, one_way_ms / 1e3)
    step = step_time(manifest, as_fast_as(manifest, unshaped), links, 1)
    return manifest.inner.microbatches * manifest.tokens_per_microbatch / step.whole, step.limit
