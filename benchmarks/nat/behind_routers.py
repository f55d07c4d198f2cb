"""Real nodes of a run behind home routers, in network namespaces of this machine: who trains, and through whom.

    sudo .venv/bin/python benchmarks/nat/behind_routers.py --public 0,1 --hidden 0,0,1,1 --kill-seed 120 --seconds 300

Needs root, iproute2, nftables and, for `--home forgets`, a kernel whose conntrack is set by namespace. A seed peer
has 11.0.0.1; idle seed peers of the same run and public nodes have addresses of their own. Each hidden node is behind
a router of its own that drops what is unasked. Prints the nodes' steps every 15 s, what each peer reports of ways in,
who averaged with whom, and what every interface moved; the last line is JSON with the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from namespaces import HOMES, Network, shell

ROOT = Path(__file__).resolve().parents[2]
REPORTS = r"dial this node|passes? streams|pass streams|passed on|Passed on|ways? in|Announcing|may join|noloco join"
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass
class Peer:
    name: str
    space: str
    folder: Path
    process: subprocess.Popen[bytes]
    stage: int | None = None
    born: float = field(default_factory=time.time)

    def events(self) -> list[dict[str, object]]:
        try:
            lines = (self.folder / "events.jsonl").read_text().splitlines()
        except OSError:
            return []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def step(self) -> int:
        found = re.findall(r'"step": ?(\d+)', "\n".join(json.dumps(event) for event in self.events()))
        return max(map(int, found), default=0)

    def peer_id(self) -> str:
        told = (str(event["addresses"]) for event in self.events() if event["event"] == "addresses")
        return next((re.findall(r"/p2p/(\w+)", text)[-1] for text in told), "")

    def passed_on(self) -> float:
        """Megabytes, by its last line on them."""
        text = (self.folder.parent / f"{self.name}.log").read_text()
        told = re.findall(
            r"(?:has passed on |, )([\d.]+) (B|KiB|MiB|GiB)(?: passed on| between members)", text
        )
        return float(told[-1][0]) * UNITS[told[-1][1]] / 1e6 if told else 0.0

    def moved(self) -> tuple[float, float]:
        """Megabytes in and out of its interface."""
        text = shell("ip", "netns", "exec", self.space, "cat", "/proc/net/dev")
        numbers = text.split("eth0:")[1].split()
        return int(numbers[0]) / 1e6, int(numbers[8]) / 1e6


class Rig:
    """The run. Mutable state: its peers, and when the hidden ones were started."""

    def __init__(self, options: argparse.Namespace, network: Network, folder: Path) -> None:
        self.options, self.network, self.folder = options, network, folder
        self.peers: list[Peer] = []
        self.join = ""

    def start(self, name: str, space: str, module: str, *arguments: str, stage: int | None = None) -> Peer:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = ["ip", "netns", "exec", space, sys.executable, "-m", module, *arguments]
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=self.folder)
        self.peers.append(Peer(name, space, self.folder / name, process, stage))
        return self.peers[-1]

    def seed(self, name: str, address: str, *arguments: str) -> Peer:
        space, file = self.network.public(name, address), self.folder / f"{name}.addresses"
        listening = ("--port", "4001", "--announce", f"/ip4/{address}/tcp/4001", "--address-file", str(file))
        directory = ("--state-dir", str(self.folder / name))
        peer = self.start(name, space, "bootstrap.found_cli", *directory, *listening, *arguments)
        while not (file.exists() and file.read_text()):
            if peer.process.poll() is not None:
                sys.exit((self.folder / f"{name}.log").read_text())
            time.sleep(0.3)
        found = re.search(r"/ip4/11\S+/p2p/\S+", file.read_text())
        assert found
        self.join = self.join or found.group()
        return peer

    def node(self, name: str, space: str, stage: int, *arguments: str) -> Peer:
        given = (
            "--join",
            self.join,
            "--stage",
            str(stage),
            "--threads",
            "1",
            "--device",
            "cpu",
            "--no-moves",
        )
        directory = ("--state-dir", str(self.folder / name))
        return self.start(name, space, "node.cli", *given, *directory, *arguments, stage=stage)

    def begin(self) -> list[Peer]:
        """Start all; returns the nodes."""
        options, nodes = self.options, list[Peer]()
        upload = ("--max-upload", options.seed_upload) if options.seed_upload else ()
        self.seed("s1", "11.0.0.1", "--preset", "tiny", "--relay-for-others", options.seed_rate, *upload)
        for number in range(options.idle):
            name, given = f"s{number + 2}", ("--relay-for-others", options.idle_rate, "--join", self.join)
            (self.folder / name).mkdir()  # of a seed peer of the same run, with a key of its own
            shutil.copy(self.folder / "s1" / "manifest.noloco", self.folder / name)
            self.seed(name, f"11.0.0.{number + 2}", *given)
        for number, stage in enumerate(map(int, filter(None, options.public.split(",")))):
            address, name = f"11.0.0.{number + 50}", f"p{number + 1}"
            listening = ("--port", "4001", "--announce", f"/ip4/{address}/tcp/4001")
            space = self.network.public(name, address)
            relays = ("--relay-for-others", options.relay) if options.relay else ()
            nodes.append(self.node(name, space, stage, *listening, *relays))
        homes = options.home.split(",")
        for number, stage in enumerate(map(int, filter(None, options.hidden.split(",")))):
            space = self.network.home(number + 1, homes[number % len(homes)])
            nodes.append(self.node(f"h{number + 1}", space, stage))
        return nodes

    def watch(self, nodes: list[Peer]) -> float:
        """Print the steps until the time is over; returns the seconds at which the seed peer was killed."""
        began, killed, seed, out = time.monotonic(), 0.0, self.peers[0], 0.0
        while (now := time.monotonic() - began) < self.options.seconds:
            time.sleep(15 - now % 15)
            now = time.monotonic() - began
            before, out = out, seed.moved()[1]
            sent = f"(s1 sends {(out - before) * 8 / 15:.1f} Mbit/s)"
            print(f"{now:5.0f} s: steps", *(f"{node.name}={node.step()}" for node in nodes), sent, flush=True)
            if self.options.kill_seed and not killed and now >= self.options.kill_seed:
                killed, how = time.time(), "cut off" if self.options.cut else "killed, kill -9"
                if self.options.cut:
                    shell("ip", "-n", seed.space, "link", "set", "eth0", "down")
                else:
                    os.kill(seed.process.pid, signal.SIGKILL)
                print(f"{now:5.0f} s: the seed peer is {how}", flush=True)
        return killed

    def report(self, nodes: list[Peer], killed: float) -> None:
        moved = {peer.name: tuple(round(one, 1) for one in peer.moved()) for peer in self.peers}
        self.end()  # a seed peer logs what it has passed on
        names = {node.peer_id(): node.name for node in nodes}
        for node in nodes:
            ways = [event for event in node.events() if event["event"] == "reached-through"]
            print(
                f"  {node.name}: ways in at",
                *(f"{float(str(one['time'])) - node.born:.0f} s" for one in ways),
            )
            for event in node.events():
                if event["event"] in ("met-directly", "no-longer-direct"):
                    who = ", ".join(names.get(peer, peer[-8:]) for peer in event["peers"])  # type: ignore[attr-defined]
                    print(
                        f"  {node.name}: {event['event']} at {float(str(event['time'])) - node.born:.0f} s: {who}"
                    )
            if killed and (
                later := [float(str(one["time"])) for one in ways if float(str(one["time"])) > killed]
            ):
                print(f"  {node.name}: another way in {later[0] - killed:.1f} s after the seed peer was gone")
        for peer in self.peers:
            lines = (self.folder / f"{peer.name}.log").read_text().splitlines()
            for line in [line for line in lines if re.search(REPORTS, line)][-self.options.lines :]:
                print(f"  {peer.name}: {line[:220]}")
        met = dict[str, dict[str, int]]()
        for node in nodes:
            rounds = [event for event in node.events() if event["event"] == "round"]
            since = [event for event in rounds if float(str(event["time"])) >= killed][:20]
            partners = (str(one["partner"] or "alone") for one in since)
            met[node.name] = Counter(names.get(partner, partner[-8:]) for partner in partners)
            print(
                f"  {node.name} (stage {node.stage}): {len(rounds)} rounds, the first 20: {dict(met[node.name])}"
            )
        for name, (came, went) in moved.items():
            print(f"  {name}: in {came:.1f} MB, out {went:.1f} MB")
        passed = {peer.name: round(peer.passed_on(), 1) for peer in self.peers}
        # what a node sends and does not pass on is sent once by the peer between as well, if there is one
        sent = sum(moved[node.name][1] - passed[node.name] for node in nodes)
        share = sum(passed.values()) / sent if sent else 0.0
        print(f"  passed on: {passed}, {share:.2f} of the {sent:.1f} MB that the nodes sent of their own")
        steps = {node.name: node.step() for node in nodes}
        for node in nodes:
            times = [float(str(event["time"])) for event in node.events() if event["event"] == "step"]
            soon = sum(time < times[0] + 60 for time in times)
            if times:
                print(
                    f"  {node.name}: first step {times[0] - node.born:.0f} s after its start, {soon} in 60 s since"
                )
        figures = {"steps": steps, "met": met, "moved": moved, "passed_on": passed, "share": round(share, 3)}
        print(json.dumps({"options": vars(self.options), **figures}))

    def end(self) -> None:
        for ending in (signal.SIGTERM, signal.SIGKILL):
            for peer in self.peers:
                if peer.process.poll() is None:
                    peer.process.send_signal(ending)
            ends = time.monotonic() + 12
            while time.monotonic() < ends and any(peer.process.poll() is None for peer in self.peers):
                time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--public", default="", help="stages of nodes with public addresses, as 0,1")
    parser.add_argument("--hidden", default="0,1", help="stages of nodes behind routers of their own")
    parser.add_argument("--home", default="cone", help=f"kinds of routers, in turn: {', '.join(HOMES)}")
    parser.add_argument("--idle", type=int, default=0, help="seed peers of the same run beside the first")
    parser.add_argument("--relay", default="", help="--relay-for-others of the public nodes")
    parser.add_argument("--seed-rate", default="20Mbit", help="--relay-for-others of the first seed peer")
    parser.add_argument("--idle-rate", default="20Mbit", help="the same of the others")
    parser.add_argument("--seed-upload", default="", help="--max-upload of the first seed peer")
    parser.add_argument("--kill-seed", type=float, default=0.0, help="seconds after which kill -9 ends it")
    parser.add_argument(
        "--cut", action="store_true", help="cut the seed peer off then, as a machine without power"
    )
    parser.add_argument(
        "--shape", default="", help="what each machine sends at most, as tc writes it: 20mbit"
    )
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--lines", type=int, default=4, help="lines of each log to print")
    parser.add_argument("--prefix", default="nl", help="of the names of namespaces")
    parser.add_argument("--keep", help="copy logs and events there")
    options = parser.parse_args()
    folder, network = Path(tempfile.mkdtemp(prefix="noloco-nat-")), Network(options.prefix, options.shape)
    rig = Rig(options, network, folder)
    try:
        network.begin()
        nodes = rig.begin()
        rig.report(nodes, rig.watch(nodes))
    finally:
        rig.end()
        network.end()
        if options.keep:
            shutil.copytree(
                folder, options.keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.socket")
            )
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
