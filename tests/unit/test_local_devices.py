"""What `noloco swarm --device` has its nodes compute on, and says about it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from bootstrap.local.devices import devices_told
from bootstrap.local.nodes import LocalPlan
from protocol.errors import UserError
from protocol.run.manifest import load_preset


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two of them, of which only names are asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")


def options_of(devices: tuple[str, ...], replicas: int = 2) -> list[dict[str, str]]:
    """The device and the memory that each node of two stages is given."""
    manifest = load_preset("tiny").model_copy(update={"stages": 2})
    plan = LocalPlan(manifest, replicas, Path("d"), 1.0, 8, Path("s.json"), devices=devices)
    found = []
    for name in plan.names():
        arguments = plan.arguments(name, "/ip4/1.2.3.4/tcp/5")
        options = dict(pairwise(arguments))
        found.append({key: options[key] for key in ("--device", "--max-memory") if key in options})
    return found


def test_without_a_gpu_auto_is_the_processor_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    devices, told = devices_told("auto")
    assert devices == ("cpu",)
    assert told == "The nodes compute on the CPU: torch sees no GPU here."
    assert options_of(devices) == [{"--device": "cpu"}] * 4


@pytest.mark.usefixtures("gpus")
def test_auto_is_the_gpu_which_all_nodes_share() -> None:
    devices, told = devices_told("auto")
    assert told == "The nodes compute on cuda:0 (NVIDIA H100 80GB HBM3)."
    assert options_of(devices) == [{"--device": "cuda:0", "--max-memory": "25%"}] * 4


@pytest.mark.usefixtures("gpus")
def test_nodes_take_several_devices_in_turn() -> None:
    devices, told = devices_told("all")
    assert told == ("The nodes compute on cuda:0 (NVIDIA H100 80GB HBM3), cuda:1 (NVIDIA H100 80GB HBM3).")
    half = {"--max-memory": "50%"}
    assert options_of(devices) == [{"--device": "cuda:0"} | half, {"--device": "cuda:1"} | half] * 2
    assert options_of(("cuda:0", "cpu"), replicas=1) == [{"--device": "cuda:0"}, {"--device": "cpu"}]


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("device", ["cuda:2", "cuda:x", "cuda0:", "gpu"])
def test_a_device_that_is_not_here_is_a_mistake(device: str) -> None:
    with pytest.raises(UserError, match="cannot be used here"):
        devices_told(device)
