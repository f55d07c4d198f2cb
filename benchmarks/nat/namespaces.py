"""The Internet in network namespaces of this machine: a bridge, public machines, and homes behind routers."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field

HOMES = {
    "cone": ["masquerade"],  # which keeps a flow's port: endpoint-independent in effect
    "random": ["masquerade fully-random"],  # another port for each destination
    "double": ["masquerade", "masquerade"],  # a home router behind a carrier's
    "forgets": ["masquerade"],  # flows that rest for 30 s
    "refuses": ["masquerade"],  # with RST what is unasked, as OpenWrt does
}
FORGETFUL = ("tcp_timeout_established=30", "tcp_timeout_unacknowledged=30", "tcp_loose=0")
RULES = """
table ip nat {{
  chain out {{ type nat hook postrouting priority 100; oifname "eth0" {masquerade}; }}
}}
table ip filter {{
  chain forward {{
    type filter hook forward priority 0; policy drop;
    ct state invalid drop; ct state established,related accept; iifname "in0" accept;
  }}
  chain input {{
    type filter hook input priority 0; policy accept;
    ct state established,related accept; iifname "eth0" meta l4proto tcp {unasked}; iifname "eth0" drop;
  }}
}}
"""


def shell(*command: str, text: str = "") -> str:
    return subprocess.run(command, input=text, text=True, check=True, capture_output=True).stdout


@dataclass
class Network:
    """The Internet, as a bridge, and what hangs on it. Mutable state: the namespaces made so far."""

    prefix: str
    shape: str = ""  # what each machine with an address of its own sends at most, as tc writes it
    made: list[str] = field(default_factory=list)

    def space(self, name: str) -> str:
        full = f"{self.prefix}{name}"
        shell("ip", "netns", "add", full)
        self.made.append(full)
        shell("ip", "-n", full, "link", "set", "lo", "up")
        return full

    def begin(self) -> None:
        self.wan = self.space("w")
        shell("ip", "-n", self.wan, "link", "add", "br0", "type", "bridge")
        shell("ip", "-n", self.wan, "link", "set", "br0", "up")

    def link(self, inner: str, address: str, outer: str, port: str) -> None:
        """Give `inner` an eth0 that ends as `port` in `outer`."""
        shell("ip", "-n", inner, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", outer)
        shell("ip", "-n", inner, "addr", "add", address, "dev", "eth0")
        for space, device in ((inner, "eth0"), (outer, port)):
            shell("ip", "-n", space, "link", "set", device, "up")

    def public(self, name: str, address: str) -> str:
        space = self.space(name)
        self.link(space, f"{address}/16", self.wan, f"v{name}")
        shell("ip", "-n", self.wan, "link", "set", f"v{name}", "master", "br0")
        if self.shape:
            bucket = ("rate", self.shape, "burst", "64kb", "latency", "200ms")
            shell("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *bucket)
        return space

    def home(self, number: int, kind: str) -> str:
        """A machine behind routers of that kind; the outermost has a public address."""
        outer, kinds = self.public(f"r{number}", f"11.0.{number}.1"), HOMES[kind]
        for depth, masquerade in enumerate(kinds):
            inside = "192.168" if depth == len(kinds) - 1 else "100.64"
            unasked = "reject with tcp reset" if kind == "refuses" else "drop"
            rules = RULES.format(masquerade=masquerade, unasked=unasked)
            shell("ip", "netns", "exec", outer, "nft", "-f", "-", text=rules)
            settings = ["net.ipv4.ip_forward=1"]
            if kind == "forgets":
                settings += [f"net.netfilter.nf_conntrack_{one}" for one in FORGETFUL]
            shell("ip", "netns", "exec", outer, "sysctl", "-qw", *settings)
            inner = self.space(f"h{number}" if depth == len(kinds) - 1 else f"c{number}")
            self.link(inner, f"{inside}.{number}.2/24", outer, "in0")
            shell("ip", "-n", outer, "addr", "add", f"{inside}.{number}.1/24", "dev", "in0")
            shell("ip", "-n", inner, "route", "add", "default", "via", f"{inside}.{number}.1")
            outer = inner
        return outer

    def end(self) -> None:
        for name in self.made:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
