"""Takes out of a bug report what tells who and where people are; one thing gets the same number everywhere."""

from __future__ import annotations

import ipaddress
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

PEER = re.compile(r"\b(?:12D3KooW[1-9A-HJ-NP-Za-km-z]{44}|Qm[1-9A-HJ-NP-Za-km-z]{44})\b")
TOKEN = re.compile(r"\bnoloco-[A-Za-z0-9_-]{24,}={0,2}")
NAMED_HOST = re.compile(r"(/(?:dns|dns4|dns6|dnsaddr)/)([^/\s\"']+)")
IPV4 = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")
IPV6 = re.compile(r"(?<![\w:.])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?![\w:])")
FOLDERS = re.compile(r"(?<![\w/.~…-])/(?:[^/\s\"':,()\[\]<>]+/)+")
HEX = re.compile(r"\b[0-9a-f]{32,}\b")  # run ids and digests
ENDINGS = (8, 6)  # letters of a peer id's end by which lines for people name it
LEAST_NAME = 3  # letters: a shorter one is in half of all words


class Redactor:
    """Replaces secrets in text by numbered placeholders.

    Mutable state: what stands for each secret that was met, and how often one was replaced.
    """

    def __init__(self, names: Iterable[str] = (), home: Path | None = None) -> None:
        """`names` are texts of people's choice: of the run, of nodes, of this machine and its user."""
        self.replaced = Counter[str]()
        self._known: dict[tuple[str, str], str] = {}
        self._peers: set[str] = set()
        self._home = str(Path.home() if home is None else home)
        self._libraries = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]))
        wanted = sorted({name for name in names if len(name) >= LEAST_NAME}, key=len, reverse=True)
        self._names = (
            re.compile("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in wanted)) if wanted else None
        )

    def of(self, value: object) -> object:
        """Redact texts in lists and mappings to any depth; keys count, too."""
        for text in _texts(value):
            self._peers.update(PEER.findall(text))
        return self._of(value)

    def _of(self, value: object) -> object:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {self._text(str(key)): self._of(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._of(inner) for inner in value]
        return value

    def _text(self, text: str) -> str:
        text = TOKEN.sub(lambda found: self._for("token", found[0]), text)
        text = PEER.sub(lambda found: self._for("peer", found[0]), text)
        for peer in self._peers:
            for letters in ENDINGS:
                if peer[-letters:] in text:
                    text = text.replace(peer[-letters:], self._for("peer", peer))
        text = NAMED_HOST.sub(lambda found: found[1] + self._for("host", found[2]), text)
        text = IPV4.sub(lambda found: self._address(found[0]), text)
        text = IPV6.sub(lambda found: self._address(found[0]), text)
        text = text.replace(self._home, "~") if len(self._home) > 1 else text
        text = FOLDERS.sub(self._folders, text)
        text = HEX.sub(lambda found: self._for("id", found[0]), text)
        if self._names is not None:
            text = self._names.sub(lambda found: self._for("name", found[0]), text)
        return text

    def _address(self, text: str) -> str:
        """Replace an address, except loopback and "any", which tell nothing."""
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return text
        return text if address.is_loopback or address.is_unspecified else self._for("address", text)

    def _folders(self, found: re.Match[str]) -> str:
        """Replace folders; those of libraries are of use and stay, as do parts of a multiaddress, which are none."""
        folders = found[0]
        if folders.startswith(self._libraries) or re.match(r"/(?:ip4|ip6|dns\w*|p2p|tcp|udp|unix)/", folders):
            return folders
        return f"/{self._for('folder', folders)}/"

    def _for(self, kind: str, secret: str) -> str:
        self.replaced[kind] += 1
        number = 1 + sum(known == kind for known, _ in self._known)
        return self._known.setdefault((kind, secret), f"{kind}-{number}")


def _texts(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
