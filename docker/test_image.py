"""The image, run: `make image image-test`. Needs root, buildah, and an image that is built; takes minutes.

Every container is a chroot of the image (`buildah run --isolation chroot`) with its own volume, in a network
namespace: a seed peer and a node outside, and a node behind a router that maps a port to it.

Without Docker: BUILD_IMAGE="buildah bud --isolation chroot --pull-never --layers". Where no registry of images is
reached the base is made first: `debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm
tree`, then `buildah from scratch`, `buildah add CONTAINER tree /` and `buildah commit CONTAINER
docker.io/library/debian:bookworm-slim`; what pip needs to know of an index goes into tree/etc/pip.conf.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "real"))

from daemons import wait_until  # noqa: E402
from mapped_network import OUTSIDE, ROUTER, MappedNetwork, why_unavailable  # noqa: E402

IMAGE = os.environ.get("IMAGE", "noloco-node")
BUILD = os.environ.get("BUILD_IMAGE", "")  # the command with which `make image` builds
USER = 1000
MAPPED = 41337
PATIENCE = 240.0
DOCKER_PATIENCE = 10.0  # seconds until `docker stop` kills


def buildah(*arguments: str) -> str:
    done = subprocess.run(["buildah", *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def layers(image: str) -> list[str]:
    """Their hashes, the base's first; the package is the last."""
    shown = "{{range .OCIv1.RootFS.DiffIDs}}{{.}} {{end}}"
    return buildah("inspect", "--type", "image", "--format", shown, image).split()


def why_not() -> str:
    if reason := why_unavailable():
        return reason
    if shutil.which("buildah") is None:
        return "needs buildah (Debian: apt-get install buildah)"
    known = subprocess.run(["buildah", "images", "-q", IMAGE], capture_output=True, text=True, check=False)
    return "" if known.returncode == 0 else f"no image {IMAGE} here; make image builds it"


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


class Container:
    """One container with its volume; what it runs can be started again."""

    def __init__(self, directory: Path, prefix: tuple[str, ...]) -> None:
        self.name = buildah("from", "--pull-never", IMAGE)
        buildah("mount", self.name)  # once, for all that runs in it
        self.log = directory / f"{self.name}.log"
        self._prefix = prefix
        self._main: subprocess.Popen[bytes] | None = None

    def start(self, *command: str, environment: dict[str, str] | None = None) -> None:
        """The command under the image's init, as its entry point does it."""
        variables = [f"--env={name}={value}" for name, value in (environment or {}).items()]
        run = self._command(*variables, command=("/usr/bin/tini", "--", *command))
        with self.log.open("ab") as output:
            self._main = subprocess.Popen(run, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def run(self, *command: str) -> str:
        """Another command in the same container, to its end."""
        done = subprocess.run(
            self._command(command=command), capture_output=True, text=True, check=False, timeout=PATIENCE
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{self.output}"
        return done.stdout

    def health(self) -> dict[str, Any]:
        """What the image's health check says; empty when that fails."""
        command = self._command(command=("python", "-m", "node.watch.health", "/state"))
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def wait_until_step(self, step: int) -> dict[str, Any]:
        return self.wait_until(lambda report: report.get("step", 0) >= step)

    def wait_until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first report of a healthy daemon for which the condition holds."""
        assert self._main is not None
        running = self._main

        def look() -> dict[str, Any]:
            report = self.health()
            return report if report and condition(report) else {}

        found: dict[str, Any] = wait_until(look, PATIENCE, lambda: running.poll() is None)
        assert found, self.output
        return found

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def processes(self) -> list[psutil.Process]:
        """tini and what it has started."""
        assert self._main is not None
        family = psutil.Process(self._main.pid).children(recursive=True)
        [init] = [process for process in family if process.name() == "tini"]
        return [init, *init.children(recursive=True)]

    def terminate(self) -> tuple[int, float]:
        """As `docker stop`: SIGTERM to the init. The exit code, and the seconds until the init was gone."""
        assert self._main is not None
        init = self.processes()[0]
        init.send_signal(signal.SIGTERM)
        began = time.monotonic()
        init.wait(60)
        seconds = time.monotonic() - began
        return self._main.wait(60), seconds  # buildah takes its time to clear up

    def remove(self) -> None:
        if self._main is not None and self._main.poll() is None:
            for process in reversed(self.processes()):
                process.kill()
            self._main.wait(30)
        buildah("rm", self.name)

    def _command(self, *options: str, command: tuple[str, ...]) -> list[str]:
        return [*self._prefix, "buildah", "run", "--isolation", "chroot", *options, self.name, "--", *command]


@pytest.fixture
def containers() -> Iterator[list[Container]]:
    made: list[Container] = []
    yield made
    for container in made:
        container.remove()


@pytest.mark.timeout(1800)
def test_seed_and_nodes_of_the_image_train_behind_a_mapped_port(
    tmp_path: Path, containers: list[Container]
) -> None:
    def container(prefix: tuple[str, ...]) -> Container:
        containers.append(Container(tmp_path, prefix))
        return containers[-1]

    with MappedNetwork({MAPPED: 31337}) as network:
        seed = container(network.outside)
        seed.start(
            "noloco-bootstrap", "--state-dir", "/state", "--preset", "tiny", "--address-file", "/address/seed"
        )
        assert seed.wait_until(lambda report: True)["state"] == "seed"
        join = seed.run("head", "-n", "1", "/address/seed").strip()
        assert join.startswith(f"/ip4/{OUTSIDE}/tcp/31337/p2p/")

        rented, other = container(network.inside), container(network.outside)
        platform = {"RUNPOD_PUBLIC_IP": ROUTER, "RUNPOD_TCP_PORT_31337": str(MAPPED)}
        start_other = ("noloco-node", "--join", join, "--port", "31338", "--stage", "1", "--threads", "1")
        rented.start("noloco-node", "--join", join, "--stage", "0", "--threads", "1", environment=platform)
        other.start(*start_other)
        trained = rented.wait_until_step(60)
        address = f"/ip4/{ROUTER}/tcp/{MAPPED}/p2p/{trained['peer']}"
        assert trained["addresses"] == [address]
        status = seed.run("noloco", "status", "--join", address)  # dialled from outside, through the router
        print(f"\n{status}")
        assert address in status
        assert "172.17" not in status
        for one in (seed, rented, other):
            family = {(process.name(), process.uids().real) for process in one.processes()}
            print(sorted(family))
            assert {user for _, user in family} == {USER}

        peer = other.wait_until(lambda report: True)["peer"]
        code, seconds = other.terminate()
        print(f"SIGTERM: exit code {code} in {seconds:.1f} s")
        assert (code, seconds < DOCKER_PATIENCE) == (0, True), other.output
        left = json.loads(other.run("grep", '"left"', "/state/events.jsonl").splitlines()[-1])
        other.start(*start_other)  # the same volume
        back = other.wait_until_step(left["step"] + 1)
        assert back["peer"] == peer
        assert (
            f"Continuing from the checkpoint at step {left['step']}, round {left['round']}." in other.output
        )
        assert other.terminate()[0] == 0, other.output

        anew = container(network.outside)  # a volume of its own
        anew.start(*start_other)
        assert anew.wait_until(lambda report: report["state"] == "serving")["peer"] != peer
        assert "Continuing from the checkpoint" not in anew.output
        for one in (rented, anew, seed):
            code, seconds = one.terminate()
            print(f"SIGTERM: exit code {code} in {seconds:.1f} s")
            assert (code, seconds < DOCKER_PATIENCE) == (0, True), one.output
    print(buildah("images", IMAGE))


@pytest.mark.skipif(not BUILD, reason="tell how images are built, in BUILD_IMAGE, as make image-test does")
@pytest.mark.timeout(1800)
def test_a_changed_source_line_builds_upon_the_same_dependencies(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__"))
    with (tree / "node" / "cli.py").open("a", encoding="utf-8") as file:
        file.write(f"# one line more at {time.time_ns()}\n")
    command = [*shlex.split(BUILD), "-f", "docker/Dockerfile", "-t", f"{IMAGE}:changed", "."]
    built = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    steps = re.findall(r"STEP \d+/\d+: (.*)\n(--> Using cache)?", built.stdout)
    cached = {step for step, cache in steps if cache}
    print("\n".join(f"{'cache' if step in cached else 'anew '}  {step[:90]}" for step, _ in steps))
    for requirements in ("image.lock", "torch.txt"):
        assert any(step.endswith(f"-r {requirements}") for step in cached)
    before, after = layers(IMAGE), layers(f"{IMAGE}:changed")
    differ = [old != new for old, new in zip(before, after, strict=True)]
    assert differ == [False] * (len(before) - 1) + [True]
