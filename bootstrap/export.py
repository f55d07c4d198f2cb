"""A Hugging Face checkpoint from one replica of each stage."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from bootstrap.observer import Observer
from node.model.families import model_config
from node.model.flat import layout
from node.model.stage import parameter_shapes
from node.state.transfer import Progress, fetch_slow_weights
from protocol.errors import StateError
from protocol.transport.base import PeerId


@dataclass(frozen=True)
class Exported:
    directory: Path
    parameters: int
    stages: tuple[Progress, ...]  # how far each stage's replica was


async def export_route(
    observer: Observer,
    route: Sequence[PeerId],
    directory: Path,
    tell: Callable[[str], None] = lambda sentence: None,
) -> Exported:
    """Fetch the slow weights of the route's replicas and write config.json and model.safetensors.

    Raises `JoinError` when a replica goes away, `StateError` when the directory cannot be written; an
    existing checkpoint there is replaced only when the new one is whole.
    """
    manifest = observer.manifest
    weights: dict[str, torch.Tensor] = {}
    progress: list[Progress] = []
    for stage, peer in enumerate(route):
        tell(f"Fetching stage {stage} from {peer[-8:]}")
        flat, reached = await fetch_slow_weights(observer.rpc, stage, peer)
        for place in layout(parameter_shapes(manifest, stage)):
            weights[place.name] = place.of(flat).clone()
        progress.append(reached)
    try:
        _write(observer, weights, directory, progress)
    except OSError as error:
        raise StateError(f"Cannot write to {directory} ({error.strerror}). Choose another --out.") from None
    return Exported(directory, sum(tensor.numel() for tensor in weights.values()), tuple(progress))


def _write(
    observer: Observer, weights: dict[str, torch.Tensor], directory: Path, progress: Sequence[Progress]
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    model_config(observer.manifest).save_pretrained(directory)
    beside = directory / "model.safetensors.new"
    save_file(weights, beside, metadata={"format": "pt"})
    beside.replace(directory / "model.safetensors")
    facts = {
        "run": observer.signed.run_id,
        "name": observer.manifest.name,
        "stages": [{"step": reached.step, "round": reached.round} for reached in progress],
    }
    (directory / "noloco.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
