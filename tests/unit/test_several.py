"""One command for several devices: which nodes it starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from node.config import NodeConfig, arguments_of, build_config
from node.process.serving import config_of, devices_of, limit_on, share_on
from protocol.errors import UserError


def test_all_devices_are_the_gpus_or_else_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert devices_of("all") == ["cuda:0", "cuda:1", "cuda:2"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert devices_of("all") == ["cpu"]


def test_a_list_names_them_and_one_alone_stays_as_it_is() -> None:
    assert devices_of("cuda:0, cuda:2") == ["cuda:0", "cuda:2"]
    assert devices_of("auto") == ["auto"]
    with pytest.raises(UserError, match="empty name"):
        devices_of("cuda:0,,cuda:1")


def test_each_node_has_a_state_directory_a_port_and_a_trace_of_its_own() -> None:
    config = NodeConfig(join=("x",), port=4000, trace=Path("t.json"))
    parts = [config_of(config, index, ["cpu"] * 3) for index in range(3)]
    assert len({part.state_dir for part in parts}) == 3
    assert [str(part.trace) for part in parts] == ["t-0.json", "t-1.json", "t-2.json"]
    assert [part.port for part in parts] == [4000, 4001, 4002]
    assert [config_of(NodeConfig(), index, ["cpu", "cpu"]).port for index in range(2)] == [0, 0]


def test_nodes_that_share_a_gpu_split_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = ["cuda:0", "cuda", "cuda:1", "cpu", "cpu"]
    parts = [config_of(NodeConfig(), index, devices) for index in range(5)]
    assert [part.max_memory for part in parts] == ["50%", "50%", "", "", ""]
    own = [config_of(NodeConfig(max_memory="9GiB"), index, devices).max_memory for index in range(5)]
    assert own == ["9GiB"] * 5
    total = 80 * 10**9
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=total))
    four = [int(limit_on("cuda", share_on(["cuda"] * 4, "cuda"))) for _ in range(4)]
    contexts = 4 * 500 * 2**20  # as an H100's driver takes
    assert 0.95 * total < sum(four) + contexts < total
    assert limit_on("cuda", "4GiB") == "4GiB"
    assert limit_on("cuda", "") == ""


@pytest.mark.parametrize("share", ["0%", "101%", "-5%", "x%", "%", "1e3%"])
def test_what_is_no_share(share: str) -> None:
    with pytest.raises(UserError, match="write it as 50%"):
        build_config({"max_memory": share}, {})


def test_the_flags_of_a_node_give_its_settings_again() -> None:
    config = NodeConfig(
        join=("/ip4/1.2.3.4/tcp/5", "/ip4/1.2.3.4/tcp/6"),
        relay=False,
        state_dir=Path("a b"),
        stage=2,
        device="cpu",
    )
    flags: dict[str, object] = {}
    for argument in arguments_of(config):
        name, _, value = argument.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not value:
            flags[name.removeprefix("no_")] = not name.startswith("no_")
        elif "tuple" in str(NodeConfig.model_fields[name].annotation):
            flags[name] = (*flags.get(name, ()), value)  # type: ignore[misc]
        else:
            flags[name] = value
    assert build_config(flags, {}) == config
