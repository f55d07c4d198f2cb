"""What people see of how busy the nodes are, also of those that do not tell."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from bootstrap.inspect.observer import Sighting
from bootstrap.inspect.table import WIDE, Picture, render
from bootstrap.local.summary import Summary
from node.machine.devices import peak_of
from node.membership.view import Member
from node.watch.device_use import _of_gpu, device_use
from protocol.errors import WireError
from protocol.messages.peers import NodeStats
from protocol.records.announcement import Announcement
from protocol.records.identity import Identity

PEER = Identity.from_seed("table").peer_id


def stats(**numbers: Any) -> NodeStats:
    return NodeStats(stage=0, state="serving", step=7, round=1, **numbers)


def shown(numbers: NodeStats, width: int = 100) -> str:
    record = Announcement(
        stage=0, state="serving", since=0.0, step=7, round=1, loss=None, tokens_per_second=0.0, addresses=[]
    )
    sighting = Sighting(Member(PEER, record, 1e12), numbers)
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(render(Picture("a run", 1.0, [sighting], expected=1), width))
    return console.export_text()


def test_the_busy_column_is_of_the_last_minute() -> None:
    text = shown(stats(compute_fraction=0.5, recent_compute_fraction=0.874))
    assert "busy" in text
    assert "87%" in text


def test_a_node_that_does_not_tell_gets_a_dash() -> None:
    row = next(line for line in shown(stats(loss=1.0)).splitlines() if PEER[-8:] in line)
    assert " - " in row
    assert "%" not in row


H100 = {"device": "NVIDIA H100 80GB HBM3", "memory": 51_700_000_000, "memory_of_device": 85_000_000_000}


def test_where_there_is_room_devices_are_shown_with_their_memory_and_the_share_of_their_peak() -> None:
    text = shown(stats(**H100, share_of_peak=0.4512), WIDE)
    assert "H100 80GB HBM3" in text
    assert "51.7/85 GB" in text
    assert "45%" in text
    narrow = shown(stats(**H100, share_of_peak=0.4512), 80)
    assert "H100" not in narrow
    assert max(map(len, narrow.splitlines()[:3])) <= 80


def test_an_unknown_device_has_no_wrong_number() -> None:
    text = shown(stats(device="NVIDIA H100 PCIe", memory=1, memory_of_device=2), WIDE)
    assert "unknown device" in text
    assert "unknown" not in shown(stats(device="cpu", memory=1, memory_of_device=2), WIDE)


def test_what_a_stranger_calls_its_device_is_shown_as_text() -> None:
    text = shown(stats(device="[red]\x1b[2Jx[/red] and far too much of it"), WIDE)
    assert "[red]\\x1b[2Jx[/red]" in text
    assert "too much" not in text


@pytest.mark.parametrize(("name", "tflops"), [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA L4", 121)])
def test_the_share_of_the_peak_is_by_published_numbers(
    name: str, tflops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(name=name, total_memory=80 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 10**9)
    _of_gpu.cache_clear()
    use = device_use(torch.device("cuda:0"), 0.25 * tflops * 1e12)
    _of_gpu.cache_clear()
    assert (use.name, use.memory, use.of_memory) == (name, 10**9, 80 * 10**9)
    assert use.share_of_peak == pytest.approx(0.25)


def test_nothing_is_known_of_a_part_of_a_gpu_or_another_kind() -> None:
    assert peak_of("NVIDIA A100-SXM4-40GB MIG 1g.5gb") is None
    assert peak_of("NVIDIA H100 PCIe") is None
    assert device_use(torch.device("cpu"), 1e12).share_of_peak is None


def test_the_summary_means_over_the_replicas_that_tell() -> None:
    summary = Summary(validation_loss=[(0, 0.0, 5.0)])
    for number, fraction in enumerate([0.5, 0.7, None]):
        summary.add_node(f"s0r{number}", PEER, stats(compute_fraction=fraction), {})
    assert any(line.startswith("computing        stage 0 60% of") for line in summary.lines())
    assert summary.nodes["s0r2"]["compute_fraction"] is None


def test_the_summary_says_how_long_training_waited_for_data() -> None:
    summary = Summary()
    summary.add_node("s0r0", PEER, stats(data_wait_fraction=0.0011), {})
    assert summary.nodes["s0r0"]["data_wait_fraction"] == 0.0011


def test_an_export_that_could_not_be_loaded_to_compare_says_what_to_install() -> None:
    summary = Summary(validation_loss=[(0, 0.0, 5.0)])
    summary.export = {
        "directory": "run/export",
        "parameters": 9,
        "swarm_loss": 1.5,
        "not_loaded": "Install it.",
    }
    expected = "export           run/export: swarm 1.500000; not loaded to compare. Install it."
    assert expected in summary.lines()
    summary.export = {"directory": "x", "parameters": 9, "swarm_loss": 1.5, "loss": 1.5, "difference": 0.0}
    assert "export           x: transformers 1.500000, swarm 1.500000, difference 0.0e+00" in summary.lines()


def test_a_swarm_ended_before_its_loss_was_measured_again_claims_no_end() -> None:
    summary = Summary(validation_loss=[(0, 0.0, 5.74)], unigram_entropy=3.2, bigram_entropy=2.4, tokens=7_680)
    told = "\n".join(summary.lines())
    assert "start 5.740   (ended before it was measured again)" in told
    assert "the end is" not in told
    assert "7,680 tokens" in told
    summary.validation_loss.append((7_680, 9.0, 5.1))
    told = "\n".join(summary.lines())
    assert "start 5.740   end 5.100 nats per byte\n" in told
    assert "(the end is not below the bigram's)" in told
    summary.tokens = 9_000  # ended on the way
    assert "end 5.100 nats per byte, at 7,680 tokens\n" in "\n".join(summary.lines())


@pytest.mark.parametrize("field", ["compute_fraction", "recent_compute_fraction"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), "much"])
def test_a_fraction_out_of_bounds_is_malformed(field: str, value: object) -> None:
    body = stats().model_dump() | {field: value}
    with pytest.raises(WireError, match=field):
        NodeStats.parsed(body)
