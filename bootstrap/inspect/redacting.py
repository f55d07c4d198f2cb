"""Takes out of a bug report what tells who and where people are: what may stay is listed, all else goes.

Words that this program's own source has may stay, numbers, and what the operating system says of errors. Everything
else is replaced by its kind and a number, as <peer 3>, <path 1>, <text 7>; one thing gets the same number everywhere.
"""

from __future__ import annotations

import builtins
import errno
import ipaddress
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("protocol", "node", "bootstrap")
LIBRARIES = {*SOURCES, "torch", "hivemind", "numpy", "numba", "pydantic", "msgpack", "uvloop", "tokenizers",
             "safetensors", "starlette", "uvicorn"}  # fmt: skip
BASE58 = "1-9A-HJ-NP-Za-km-z"
PEER_ID = rf"(?:12D3KooW[{BASE58}]{{44}}|Qm[{BASE58}]{{44}})"
HOSTS = "dns|dns4|dns6|dnsaddr"
LEAST_NAME = 3  # letters: a shorter one is in half of all words
LEAST_END = 5  # letters of a peer id by which a line may name it
WHOLE = {
    "name": "name",
    "names": "name",
    "text": "text",
    "prompt": "text",
    "host": "host",
    "user": "name",
}  # by key

PATTERNS: list[tuple[str, re.Pattern[str]]] = [
    ("token", re.compile(r"noloco-[A-Za-z0-9_-]{16,}={0,2}")),
    ("url", re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]+")),
    ("multiaddress", re.compile(rf"/(?:ip4|ip6|{HOSTS}|p2p|tcp|udp)/[^\s\"'<>,;)\]]+")),
    ("mail", re.compile(r"[^\s\"'<>/@:=(\[]+@[^\s\"'<>@)\]]+")),
    ("peer", re.compile(rf"(?<![{BASE58}0OIl]){PEER_ID}")),
    ("end", re.compile(rf"(?<=…)[{BASE58}]{{4,}}")),
    ("path", re.compile(r"([\"'])(?:~?/|\.{1,2}/|[A-Za-z]:\\|\\\\)[^\"'\n]*\1")),
    ("path", re.compile(r"(?<![\w/.])[~.]{0,2}/(?:[^\s/\"<>]+(?: [^\s/\"<>]+){0,4}/)*[^\s\"<>]*")),
    ("path", re.compile(r"(?:[A-Za-z]:\\|\\\\)(?:[^\s\\\"<>]+(?: [^\s\\\"<>]+){0,4}\\)*[^\s\"<>]*")),
    ("address", re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d]|\.\d)")),
    ("address", re.compile(r"(?<![\w:.])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?:%\w+)?(?![\w:])")),
    ("address", re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{2}[:-]){5}[0-9a-fA-F]{2}(?![\w:])")),
    ("id", re.compile(r"(?<!\w)(?:0[xX][0-9a-fA-F]+|[0-9a-fA-F]{16,})(?!\w)")),
    ("id", re.compile(r"(?<!\w)(?=\d*[a-fA-F])(?=[a-fA-F]*\d)[0-9a-fA-F]{8,}(?!\w)")),
    ("number", re.compile(r"(?<![\w.,:-])(?!\d{4}-\d\d-\d\d)\+?\(?\d(?:[ ()/-]{0,2}\d){8,}(?![\w.,:])")),
]  # fmt: skip
WORD = re.compile(r"\w(?:[\w.'’-]*\w)?")
NUMBER = re.compile(
    r"\d{1,3}|[1-9]\d{0,5}|\d{1,6}\.\d{1,12}(?:e[+-]?\d{1,3})?|\d(?:\.\d+)?e[+-]?\d{1,3}|\d{1,3}(?:\.\d{1,5}){2}"
    r"|\d{4}-\d\d-\d\d(?:T\d\d)?|v\d{1,3}(?:\.\d{1,3}){0,2}",
    re.IGNORECASE,
)
MEASURE = re.compile(r"\d{1,6}(?:\.\d{1,6})?(?:%|[kKMGT]?i?[bB]|[kMG]bit|ms|[smhdx])")
OWN_FILE = re.compile(
    r"(?:checkpoint-\d{1,4}(?:-older)?\.safetensors(?:\.damaged\d*)?|events(?:\.1)?\.jsonl|node\.log(?:\.1)?)"
)
COMPOUND = re.compile(r"[A-Za-z]\w*(?:[._-]\w+)+")
MORE = "jan feb mar apr may jun jul aug sep oct nov dec mon tue wed thu fri sat sun linux darwin cuda"
HELD = re.compile("\ue000(\\d+)\ue001")  # what has been replaced while a text is being worked on


@cache
def known_words() -> tuple[frozenset[str], frozenset[str]]:
    """Return the words of this program's source and of the system's errors, and those with dots and dashes."""
    texts = [
        path.read_text(encoding="utf-8", errors="replace")
        for folder in SOURCES
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".toml")
    ]
    texts += [os.strerror(number) for number in errno.errorcode]
    texts += [*dir(builtins), *errno.errorcode.values(), *(s.name for s in signal.Signals), MORE]
    words, compounds = set[str](), set[str]()
    for text in texts:
        words.update(word.casefold() for word in re.findall(r"[A-Za-z]+", text))
        compounds.update(word.casefold() for word in COMPOUND.findall(text))
    return frozenset(words), frozenset(compounds)


class Redactor:
    """Replaces all that is not known to be harmless.

    Mutable state: what stands for each thing that was met, and how often one of each kind was replaced.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        """`names` are texts of people's choice: of the run, of nodes, of this machine and its user."""
        self.replaced = Counter[str]()
        self._known: dict[tuple[str, str], str] = {}
        self._count = Counter[str]()
        self._peers: dict[str, None] = {}
        self._words, self._compounds = known_words()
        wanted = sorted({name for name in names if len(name) >= LEAST_NAME}, key=len, reverse=True)
        self._names = (
            re.compile("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in wanted), re.IGNORECASE)
            if wanted
            else None
        )

    def of(self, value: object) -> object:
        """Redact texts in lists and mappings to any depth; keys count, too."""
        for text in _texts(value):
            self._peers.update(dict.fromkeys(re.findall(PEER_ID, text)))
        return self._of(value)

    def _of(self, value: object, kind: str = "") -> object:
        if isinstance(value, str):
            return self._for(kind, value) if kind and value else self._text(value)
        if isinstance(value, Mapping):
            return {
                self._text(str(key)): self._of(inner, WHOLE.get(str(key), "")) for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._of(inner, kind) for inner in value]
        return value

    def _text(self, text: str) -> str:
        held: list[str] = []

        def hold(replacement: str) -> str:
            held.append(replacement)
            return f"\ue000{len(held) - 1}\ue001"

        text = text.replace("\ue000", "?").replace("\ue001", "?")
        if self._names is not None:
            text = self._names.sub(lambda found: hold(self._for("name", found[0])), text)
        for kind, pattern in PATTERNS:
            text = pattern.sub(self._by(kind, hold), text)
        parts = re.split("(\ue000\\d+\ue001)", text)
        return "".join(
            held[int(found[1])] if (found := HELD.fullmatch(part)) else WORD.sub(self._word, part)
            for part in parts
        )

    def _by(self, kind: str, hold: Callable[[str], str]) -> Callable[[re.Match[str]], str]:
        """Return what replaces a match of a kind's pattern; what was replaced inside of it is lost with it."""

        def replaced(found: re.Match[str]) -> str:
            whole = found[0]
            secret = whole.rstrip(".,;:)]}") if kind in ("url", "path", "multiaddress", "mail") else whole
            rest = whole[len(secret) :]
            if not secret.strip("~./\\"):
                return whole
            match kind:
                case "multiaddress":
                    return hold(self._multiaddress(secret)) + rest
                case "path":
                    return hold(self._path(secret.strip("\"'"))) + rest
                case "address":
                    return hold(self._address(secret)) + rest
                case "peer" | "end":
                    return hold(self._peer(secret)) + rest
            return hold(self._for(kind, secret)) + rest

        return replaced

    def _multiaddress(self, text: str) -> str:
        """Keep the protocols and ports of an address."""
        parts = text.split("/")
        for place in range(2, len(parts), 2):
            kind, value = parts[place - 1], parts[place]
            if kind in ("ip4", "ip6"):
                parts[place] = self._address(value)
            elif kind == "p2p":
                parts[place] = self._peer(value)
            elif not (kind in ("tcp", "udp") and re.fullmatch(r"\d{1,5}", value)):
                parts[place] = self._for("host", value)
        protocols = parts[1::2]
        known = {"ip4", "ip6", "tcp", "udp", "p2p", "quic", "quic-v1", "p2p-circuit", *HOSTS.split("|")}
        return "/".join(parts) if known.issuperset(protocols) else self._for("path", text)

    def _path(self, text: str) -> str:
        """Keep where in a library a traceback is, and the name of a file of our own."""
        parts = re.split(r"[/\\]", text)
        anchors = [n for n, part in enumerate(parts) if part == "site-packages"] or [
            n for n, part in enumerate(parts) if re.fullmatch(r"python3\.\d+", part)
        ]
        begin = anchors[-1] + 1 if anchors else len(ROOT.parts) if text.startswith(f"{ROOT}/") else 0
        inner = parts[begin:] or [""]
        known = LIBRARIES | sys.stdlib_module_names
        is_plain = all(re.fullmatch(r"[A-Za-z_0-9]+(?:\.py)?", part) for part in inner)
        if begin and is_plain and inner[0].removesuffix(".py") in known and inner[-1].endswith(".py"):
            return "…/" + "/".join(inner)
        if len(parts) > 1 and OWN_FILE.fullmatch(parts[-1]):
            return f"{self._for('path', text[: -len(parts[-1]) - 1])}/{parts[-1]}"
        return self._for("path", text)

    def _address(self, text: str) -> str:
        """Replace an address, except loopback and "any", which tell nothing; of clock times nothing."""
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            is_time = re.fullmatch(r"\d{1,2}:\d\d:\d\d", text) or not re.search(r"[0-9a-fA-F]", text)
            return text if is_time else self._for("address", text)
        return text if address.is_loopback or address.is_unspecified else self._for("address", text)

    def _peer(self, text: str) -> str:
        """Replace a peer id or an end of one, by the number of the whole one if that is known."""
        known = next((peer for peer in self._peers if peer.endswith(text) or peer.startswith(text)), text)
        return self._for("peer", known)

    def _word(self, found: re.Match[str]) -> str:
        word = found[0]
        folded = word.casefold().replace("’", "'")
        plain = folded.removesuffix("'s")
        if NUMBER.fullmatch(word) or MEASURE.fullmatch(word) or OWN_FILE.fullmatch(word):
            return word
        if plain in self._words or plain in self._compounds or folded in ("n't", "isn't"):
            return word
        if word.startswith(("NOLOCO_", "OMP_")) and all(
            part.casefold() in self._words for part in word.split("_")
        ):
            return word
        if len(word) >= LEAST_END and any(
            peer.endswith(word) or peer.startswith(word) for peer in self._peers
        ):
            return self._peer(word)
        return self._for("text", word)

    def _for(self, kind: str, secret: str) -> str:
        self.replaced[kind] += 1
        if (kind, secret) not in self._known:
            self._count[kind] += 1
            self._known[kind, secret] = f"<{kind} {self._count[kind]}>"
        return self._known[kind, secret]


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
