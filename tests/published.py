"""The preset tiny with the averaging of NoLoCo's paper, which tests of single settings change further."""

from __future__ import annotations

from protocol.run.manifest import Manifest, load_preset, manifest_from, preset_text

OUTER = {"alpha": 0.5, "beta": 0.7, "gamma": 0.7, "inner_steps": 25}


def published_tiny() -> Manifest:
    contents = load_preset("tiny").model_dump()
    contents["outer"].update(OUTER)
    contents["wire"]["gossip"] = "fp32"
    return manifest_from(contents)


def published_text() -> str:
    """The same as a file that people change."""
    lines = []
    for line in preset_text("tiny").splitlines():
        name = line.partition(" = ")[0]
        if name == "gossip":
            line = 'gossip = "fp32"'
        elif name in OUTER:
            line = f"{name} = {OUTER[name]}"
        lines.append(line)
    return "\n".join(lines) + "\n"
