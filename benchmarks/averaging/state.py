"""The state that is averaged: one stage of a Llama of a given size, and the sample by which averages are checked."""

from __future__ import annotations

import torch

from protocol.run.manifest import Manifest, manifest_from

LAYERS = 6
VOCABULARY = 256
SAMPLES = 64
INNER_STEPS = 40


def manifest_of(
    megabytes: float, overlap: str = "none", gossip: str = "fp32", progress: str = "fp32"
) -> Manifest:
    """A run of one stage with about `megabytes` × 10⁶ bytes of float32 parameters, to within half a percent."""
    hidden, intermediate = _shape(megabytes * 1e6 / 4)
    return manifest_from(
        {
            "name": "gossip-benchmark",
            "stages": 1,
            "model": {
                "vocab_size": VOCABULARY,
                "hidden_size": hidden,
                "layers": LAYERS,
                "heads": max(1, hidden // 64),
                "intermediate_size": intermediate,
            },
            "data": {"sequence_tokens": 64},
            "inner": {
                "learning_rate": 1e-3,
                "min_learning_rate": 1e-4,
                "warmup_steps": 1,
                "total_steps": 1_000_000,
                "microbatches": 1,
                "sequences": 1,
            },
            "outer": {"inner_steps": INNER_STEPS, "overlap": overlap},
            "wire": {"gossip": gossip, "progress": progress},
            "limits": {"gossip_deadline": 120.0},
        }
    )


def shapes_of(manifest: Manifest) -> list[tuple[int, ...]]:
    """Of the stage's parameters, for whoever averages a list of tensors."""
    from node.model.stage import parameter_shapes  # takes seconds, and the measured processes can do without

    return list(parameter_shapes(manifest, 0).values())


def sample(flat: torch.Tensor) -> list[float]:
    """A few entries from all over a flat tensor."""
    return [float(value) for value in flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES]]


def _shape(parameters: float) -> tuple[int, int]:
    """Hidden and intermediate size: the widest model whose layers are not thinner than usual."""
    for hidden in (1024, 512, 256, 128, 64):
        per_layer = (parameters - 2 * VOCABULARY * hidden - hidden) / LAYERS
        intermediate = int((per_layer - 4 * hidden**2 - 2 * hidden) / (3 * hidden))
        if intermediate >= 2 * hidden:
            return hidden, intermediate
    raise ValueError(f"{parameters * 4 / 1e6:g} MB are too few for a model; ask for at least 2")
