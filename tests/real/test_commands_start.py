"""What a command imports before it has something to do: seconds that whoever asks for --help would wait."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

HEAVY = {
    "torch", "transformers", "hivemind", "numba", "numpy", "scipy", "matplotlib", "networkx", "datasets", "pyarrow",
    "tokenizers", "safetensors", "huggingface_hub", "starlette", "uvicorn", "prometheus_client", "tensorboard",
}  # fmt: skip

CALL = """
import json, sys
from {module} import app
try:
    app({arguments!r})
except SystemExit as end:
    print("\\n" + json.dumps([end.code, sorted(sys.modules)]))
"""


def modules_after(program: str) -> tuple[int, set[str]]:
    """The exit code that the program tells, and what it has imported."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    code, names = json.loads(done.stdout.splitlines()[-1])
    return code, set(names)


@pytest.mark.parametrize(
    ("module", "arguments", "expected"),
    [
        ("node.cli", ["--help"], 0),
        ("node.cli", ["--no-such-option"], 2),
        ("node.cli", ["--max-memory", "much"], 2),
        ("bootstrap.found_cli", ["--help"], 0),
        ("bootstrap.found_cli", ["init", "--yes", "/"], 2),
        ("bootstrap.tools_cli", ["--help"], 0),
        ("bootstrap.tools_cli", ["status", "--help"], 0),
        ("bootstrap.tools_cli", ["dashboard", "--help"], 0),
        ("bootstrap.tools_cli", ["dashboard"], 2),
        ("bootstrap.tools_cli", ["watch"], 2),
        ("node.cli", ["--dashboard", "here"], 2),
        ("bootstrap.found_cli", ["--dashboard", "here"], 2),
        ("bootstrap.tools_cli", ["plan", "--picture", "no.jpg"], 2),
        ("bootstrap.tools_cli", ["eval"], 2),
        ("bootstrap.tools_cli", ["doctor", "--port", "high"], 2),
        ("bootstrap.tools_cli", ["doctor", "--self", "/nowhere"], 1),
        ("bootstrap.tools_cli", ["generate", "--tokens", "0"], 2),
        ("bootstrap.tools_cli", ["manifest", "check"], 2),
        ("bootstrap.tools_cli", ["simulate", "learning", "--steps", "many"], 2),
    ],
)
def test_help_and_mistakes_wait_for_no_heavy_import(module: str, arguments: list[str], expected: int) -> None:
    code, imported = modules_after(CALL.format(module=module, arguments=arguments))
    assert code == expected
    assert not imported & HEAVY


def test_a_look_at_a_swarm_does_without_what_models_are_made_with() -> None:
    program = "import bootstrap.inspect.table, json, sys; print(json.dumps([0, sorted(sys.modules)]))"
    _, imported = modules_after(program)
    assert not imported & {"transformers", "matplotlib", "networkx", "datasets", "pyarrow", "tokenizers"}


def test_hivemind_stays_silent_when_it_is_imported_after_logging_was_set_up() -> None:
    program = (
        "import json, logging\n"
        "from node.watch.events import set_up_logging\n"
        "set_up_logging(verbose=False)\n"
        "import protocol.transport.hivemind_api\n"
        "print(json.dumps([logging.getLogger('hivemind').level, []]))\n"
    )
    level, _ = modules_after(program)
    assert level == logging.CRITICAL
