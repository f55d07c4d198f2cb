"""The limits that a volunteer may set and, while the node runs, change. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping

from node.config import NodeConfig, build_config
from node.machine.limits import parse_rate, parse_size
from protocol.errors import UserError

LIMITS = (
    "max_upload", "max_download", "monthly_cap", "gpu_percent", "max_temperature", "hours", "network_hours",
    "only_idle",
)  # fmt: skip
NONE = "none"  # lifts a limit

Limit = str | int | bool


def without_none(wishes: Mapping[str, Limit]) -> dict[str, Limit]:
    """The settings that are wished, where `NONE` stands for no limit. Raises `UserError` for what is no limit."""
    unknown = [name for name in wishes if name not in LIMITS]
    if unknown:
        raise UserError(f"{', '.join(unknown)}: no limit of a running node; there are {', '.join(LIMITS)}.")
    fields = NodeConfig.model_fields
    lifted = {name for name, wish in wishes.items() if isinstance(wish, str) and wish.strip().lower() == NONE}
    return {name: fields[name].default if name in lifted else wish for name, wish in wishes.items()}


def changed(config: NodeConfig, wishes: Mapping[str, Limit]) -> NodeConfig:
    """The settings with other limits. Raises `UserError` that names each one that cannot be used."""
    return build_config(config.model_dump() | without_none(wishes), {})


def of_one_node(limits: Mapping[str, Limit], nodes: int) -> dict[str, Limit]:
    """The limits of one of several nodes of a command, which share the network; the others are each one's own."""
    parts = dict(limits)
    if nodes == 1:
        return parts
    for name in ("max_upload", "max_download"):
        if limit := limits.get(name):
            each = f"{8e-6 * parse_rate(str(limit)) / nodes:.6f}"
            parts[name] = each.rstrip("0").rstrip(".") + "Mbit"
    if cap := limits.get("monthly_cap"):
        parts["monthly_cap"] = str(max(1, parse_size(str(cap)) // nodes))
    return parts


def as_settings(wishes: Mapping[str, Limit]) -> list[str]:
    """Lines of a settings file that set these limits, numbers and yes or no as such."""
    parsed = changed(NodeConfig(), wishes)
    return [f"{name} = {json.dumps(getattr(parsed, name), ensure_ascii=False)}" for name in wishes]


def limits_of(config: NodeConfig) -> dict[str, str]:
    """The limits in force, each as people write it; empty where there is none."""
    given: dict[str, str] = {}
    for name in LIMITS:
        value = getattr(config, name)
        is_set = value != NodeConfig.model_fields[name].default
        given[name] = ("yes" if value is True else str(value)) if is_set else ""
    return given
