"""The programs start under the mounts, users and variables that the files of docker/ give them."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from protocol.errors import DONE, LATER, MEND
from tests.real.confined import (
    NAMELESS,
    Confinement,
    confined_as_container,
    confined_by_unit,
    folder_of,
    why_unavailable,
)
from tests.real.daemons import PATIENCE, Daemon
from tests.real.test_wrong_inputs import NOBODY

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docker" / "deploy"
# what the kubelet sets for the services of a namespace: one that is called as the settings begin, and the pods' own
LINKS = {
    f"{name}_{rest}": value
    for name in ("KUBERNETES", "NOLOCO", "NOLOCO_NODE")
    for rest, value in {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "5432",
        "SERVICE_PORT_LIBP2P": "5432",
        "PORT": "tcp://10.0.0.1:5432",
        "PORT_5432_TCP": "tcp://10.0.0.1:5432",
        "PORT_5432_TCP_PROTO": "tcp",
        "PORT_5432_TCP_PORT": "5432",
        "PORT_5432_TCP_ADDR": "10.0.0.1",
    }.items()
}
JOINED, LONG = "This machine's clock is", 3 * PATIENCE  # several load torch at once
HERE = {"NOLOCO_HOST": "127.0.0.1", "NOLOCO_RELAY": "0", "NOLOCO_THREADS": "1", "NOLOCO_DEVICE": "cpu"}

pytestmark = [
    pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable()),
    pytest.mark.timeout(8 * PATIENCE),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def started(name: str, file: dict[str, str], place: Path) -> Daemon:
    place.mkdir(exist_ok=True)
    confinement, command = confined_by_unit(DEPLOY / f"noloco-{name}.service", file, place)
    return Daemon(command, place / "output.log", confinement.prefix())


def founding(host: str = "127.0.0.1") -> dict[str, str]:
    return {"FOUND": f"--preset tiny --host {host} --port {free_port()}"}


def address_in(seed: Daemon) -> str:
    return seed.wait_for(r"noloco join (/ip4/127\.0\.0\.1/\S+)").group(1)


def ended(confinement: Confinement, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*confinement.prefix(), *command], capture_output=True, text=True, check=False, timeout=PATIENCE
    )


def test_seed_node_and_page_start_by_their_units(tmp_path: Path) -> None:
    seed = started("seed", founding(), tmp_path / "seed")
    address = address_in(seed)
    node = {"NOLOCO_JOIN": address, "NOLOCO_PORT": str(free_port()), "NOLOCO_STAGE": "0", **HERE}
    daemon = started("node", node, tmp_path / "node")
    listen = f"127.0.0.1:{free_port()}"
    page = started("page", {"JOIN": address, "LISTEN": listen}, tmp_path / "page")
    page.wait_for("Dashboard of run", LONG)
    with urllib.request.urlopen(f"http://{listen}/", timeout=PATIENCE) as answer:
        assert answer.status == 200
    daemon.wait_for(JOINED, LONG)

    # the order that the unit's comment names finds it, beside a private /tmp and for no other user
    state = tmp_path / "node" / "var" / "lib" / "noloco-node"
    said = (state / "health.socket").read_text(encoding="utf-8")
    assert said.startswith("/run/noloco-node/noloco-health-")
    runtime = tmp_path / "node" / "run" / "noloco-node"
    assert sorted(path.name.split("-")[1] == "health" for path in runtime.iterdir()) == [False, True]
    confinement, _ = confined_by_unit(DEPLOY / "noloco-node.service", node, tmp_path / "node")
    other = replace(confinement, environment={"PATH": confinement.environment["PATH"]})
    asked = ended(other, sys.executable, "-m", "bootstrap.tools_cli", "node", "status",
                  "--state-dir", "/var/lib/noloco-node")  # fmt: skip
    assert asked.returncode == DONE, asked.stderr
    for one in (page, daemon, seed):
        assert one.leave(PATIENCE) == DONE, one.output
        assert "Traceback" not in one.output
    assert not list(runtime.iterdir())

    again = started("seed", founding(), tmp_path / "seed")
    again.wait_for("Taking up run 'tiny'")
    assert again.leave() == DONE


@pytest.mark.parametrize("left", ["sockets in the state directory", "nothing"])
def test_a_machine_that_leaves_nothing_to_write_to(left: str, tmp_path: Path) -> None:
    """As the first unit did, which made the whole system read-only; and a user without a name or a home, in all."""
    file = {"NOLOCO_JOIN": NOBODY, "NOLOCO_PORT": str(free_port()), **HERE}
    confinement, command = confined_by_unit(DEPLOY / "noloco-node.service", file, tmp_path)
    state = "/var/lib/noloco-node"
    environment = {
        name: value for name, value in confinement.environment.items() if not name.endswith("_DIRECTORY")
    }
    if left == "nothing":
        bare = replace(confinement, shared=[], own={}, environment=environment)
        done = ended(bare, *command)
        assert done.returncode == MEND, done.stderr
        [line] = done.stderr.splitlines()
        assert "There is no folder for temporary files: none of /tmp, /var/tmp can be written." in line
        assert line.endswith("Set TMPDIR to one that this user can write.")
        return
    kept = {state: confinement.own[state]}
    environment |= {"STATE_DIRECTORY": state}
    done = ended(replace(confinement, shared=[], own=kept, environment=environment), *command)
    assert "No peer answered at" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == LATER


def pod() -> dict[str, Any]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    [found] = [each["spec"]["template"]["spec"] for each in documents if each["kind"] == "StatefulSet"]
    return dict(found)


def test_a_node_starts_as_a_pod(tmp_path: Path) -> None:
    spec = pod()
    [container] = spec["containers"]
    user = spec["securityContext"]["runAsUser"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert spec["enableServiceLinks"] is False
    seed = started("seed", founding(), tmp_path / "seed")
    values = {entry["name"]: entry.get("value", "127.0.0.1") for entry in container["env"]}
    values = {name: value.replace("$(HOST_IP)", values["HOST_IP"]) for name, value in values.items()}
    file = {"NOLOCO_JOIN": address_in(seed), "NOLOCO_STAGE": "0", **HERE}
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    volumes = {place: folder_of(user, tmp_path / f"volume{place}") for place in mounts if place != "/tmp"}
    # links, too, as of a pod file without that line: what the pod names itself comes before them
    environment = LINKS | file | values
    confinement = confined_as_container(
        ROOT / "docker" / "Dockerfile",
        user,
        environment,
        volumes,
        [place for place in mounts if place == "/tmp"],
    )
    node = Daemon(["noloco-node"], tmp_path / "output.log", confinement.prefix())
    node.wait_for(JOINED, LONG)
    probe = container["livenessProbe"]["exec"]["command"]
    beside = ("nsenter", f"--mount=/proc/{node.process.pid}/ns/mnt", f"--root=/proc/{node.process.pid}/root")
    asked = subprocess.run(
        [*beside, sys.executable, *probe[1:]], capture_output=True, text=True, check=False, timeout=PATIENCE, cwd="/",
        env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert asked.returncode == DONE, asked.stderr
    assert json.loads(asked.stdout)["healthy"]
    assert node.leave(PATIENCE) == DONE, node.output
    assert "Traceback" not in node.output
    assert seed.leave() == DONE


def test_seed_and_node_start_as_compose_starts_them(tmp_path: Path) -> None:
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))["services"]
    daemons = {}
    for name in ("seed", "node"):
        service = services[name]
        assert service["read_only"]
        places = [volume.rsplit(":ro", 1)[0].split(":")[-1] for volume in service["volumes"]]
        volumes = {place: folder_of(NAMELESS, tmp_path / ("" if place == "/address" else name) / place[1:])
                   for place in places}  # fmt: skip
        environment = {key: str(value) for key, value in service.get("environment", {}).items()}
        environment |= {"NOLOCO_ANNOUNCE": "", "NOLOCO_DASHBOARD": ""} if name == "seed" else {}
        environment |= HERE | {"NOLOCO_PORT": str(free_port())}
        confinement = confined_as_container(
            ROOT / "docker" / "Dockerfile", NAMELESS, environment, volumes, service["tmpfs"]
        )
        command = service["command"].replace("${NOLOCO_PRESET:-tiny}", "tiny").replace("$$", "$")
        words = (
            ["sh", "-c", command.removeprefix("sh -c ").strip("'")] if "sh -c" in command else command.split()
        )
        daemons[name] = Daemon(words, tmp_path / f"{name}.log", confinement.prefix())
        if name == "seed":
            daemons[name].wait_for("noloco join")
    node = daemons["node"]
    node.wait_for(JOINED, LONG)
    for daemon in (node, daemons["seed"]):
        daemon.signal(signal.SIGTERM)
        assert daemon.process.wait(PATIENCE) == DONE, daemon.output
        assert "Traceback" not in daemon.output


def test_a_long_path_for_temporary_files(tmp_path: Path) -> None:
    """multiprocessing makes sockets there, too, and a socket's path has little more than a hundred bytes."""
    long = tmp_path / ("long" * 30)
    long.mkdir()
    done = subprocess.run(
        [shutil.which("env") or "env", f"TMPDIR={long}", sys.executable, "-m", "bootstrap.tools_cli", "swarm",
         "--minutes", "0.1", "--summary", str(tmp_path / "summary.json")],
        capture_output=True, text=True, check=False, timeout=2 * PATIENCE, cwd=tmp_path,
    )  # fmt: skip
    assert "Traceback" not in done.stderr + done.stdout
    assert done.returncode == DONE, done.stderr + done.stdout
