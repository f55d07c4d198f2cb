"""What `pip install noloco-node` brings, and nothing else, founds a run, joins it, trains and watches."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.real.daemons import NodeDaemon, SeedDaemon

ROOT = Path(__file__).parent.parent.parent
# pip brings networkx, too, since torch requires it; a node does without. scipy is not here: hivemind imports it.
OPTIONAL = {"datasets", "pyarrow", "matplotlib", "networkx"}


def required(roots: list[str]) -> dict[str, Distribution]:
    """The installed distributions that these requirements take, with those that they take in turn."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(root) for root in roots]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name in found or name in OPTIONAL:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue  # for another Python or platform, by a marker below
        for line in found[name].requires or []:
            further = Requirement(line)
            for extra in ("", *wanted.extras):
                if further.marker is None or further.marker.evaluate(
                    {**default_environment(), "extra": extra}
                ):
                    waiting.append(further)
                    break
    return found


def top_level_files(of: Distribution) -> set[Path]:
    """What it put into site-packages: folders and single modules."""
    site = Path(sysconfig.get_paths()["purelib"])
    first = {Path(str(file)).parts[0] for file in of.files or []}
    return {site / name for name in first if name not in ("..", "__pycache__", "/")}


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The folder of commands of an environment with the wheel of this tree and what it requires."""
    source, made = tmp_path / "source", tmp_path / "bare"
    for name in ("protocol", "node", "bootstrap"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    venv.create(made, with_pip=False)
    site = made / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    own = distribution("noloco-node").requires or []
    for needed in required([line for line in own if "extra ==" not in line]).values():
        for path in top_level_files(needed):
            if path.exists() and not (site / path.name).exists():
                (site / path.name).symlink_to(path)
    # the wheel is made from the unpacked sdist, so that this has all that it needs
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(source)]
    subprocess.run(build, check=True, timeout=200, capture_output=True)
    [wheel] = (tmp_path / "dist").glob("*.whl")
    assert len(list((tmp_path / "dist").glob("*.tar.gz"))) == 1
    pip = [sys.executable, "-m", "pip", "--python", str(made / "bin" / "python")]
    subprocess.run(
        [*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True, timeout=100
    )
    return made / "bin"


@pytest.mark.timeout(400)
def test_a_bare_wheel_founds_joins_trains_and_says_what_else_a_command_needs(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for name in OPTIONAL:
        looked_for = subprocess.run(
            [bare / "python", "-c", f"import {name}"], capture_output=True, check=False
        )
        assert looked_for.returncode, f"{name} is there, so that this would show nothing"
    for name in ("noloco-node", "noloco-bootstrap", "noloco"):
        assert said_by(bare / name, "--version").stdout.startswith("noloco-node 0.2.0, protocol ")
        variable = f"_{name.upper().replace('-', '_')}_COMPLETE"
        with monkeypatch.context() as shell:
            shell.setenv(variable, "source_bash")
            assert "complete -o" in said_by(bare / name).stdout
    seed = SeedDaemon(tmp_path / "run", program=(str(bare / "noloco-bootstrap"),))
    address = seed.join_address()
    nodes = [
        NodeDaemon(
            tmp_path / f"node-{stage}", "--join", address, "--stage", str(stage),
            program=(str(bare / "noloco-node"),),
        )
        for stage in range(2)
    ]  # fmt: skip
    nodes[-1].wait_for_step(3, patience=200)
    status = said_by(bare / "noloco", "status", "--join", address)
    assert status.returncode == 0, status.stderr
    plan = said_by(bare / "noloco", "plan", "--join", address)
    assert plan.returncode
    assert re.search(r"package networkx, .*pip install .*\[lab\]", plan.stderr), plan.stderr
    for node in nodes:
        assert node.leave() == 0, node.output


def said_by(command: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([command, *arguments], capture_output=True, text=True, check=False, timeout=100)
