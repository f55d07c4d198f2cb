"""The way in which this copy was installed, and the command lines that install a later one, or more of it.

They name the place that the copy came from (PEP 610), never the project's name alone: no index has to have it, and
whoever registered the name there would own the machines on which people type such a line.
"""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from protocol.errors import legible
from protocol.version import DISTRIBUTION

SCHEMES = {"https", "ssh"}  # from which a line that people copy may install
LONGEST = 300  # characters of a place


@dataclass(frozen=True)
class Installation:
    """Where a copy came from: a folder, a repository, a file; empty when that is not known. And by which tool."""

    folder: str = ""
    is_editable: bool = False
    repository: str = ""
    revision: str = ""  # that was asked for: a branch or a tag
    archive: str = ""
    tool: str = "pip install"

    def with_extra(self, extra: str) -> str:
        """Return the clause that says how to install this copy with an extra."""
        part = f"[{extra}]"
        if self.folder:
            option = "-e " if self.is_editable and not self._has_own_environment else ""
            return f"{self.tool} {option}{shlex.quote(self.folder + part)}"
        if self.repository:
            at = f"@{self.revision}" if self.revision else ""
            return f"{self.tool} {shlex.quote(f'{DISTRIBUTION}{part} @ git+{self.repository}{at}')}"
        if self.archive:
            return f"{self.tool} {shlex.quote(f'{DISTRIBUTION}{part} @ {self.archive}')}"
        return f"pip install '.{part}' in the folder with this project"

    def later(self) -> str:
        """Return the clause that says how to install a later version in place of this one."""
        if self.folder and (Path(self.folder) / ".git").exists():
            folder = shlex.quote(self.folder)
            option = "-e " if self.is_editable and not self._has_own_environment else ""
            return f"git -C {folder} pull && {self.tool} {option}{folder}"
        if self.repository:
            upgrade = "" if self._has_own_environment else "--upgrade "
            return f"{self.tool} {upgrade}{shlex.quote(f'{DISTRIBUTION} @ git+{self.repository}')}"
        return "install the version of today from where this one came"

    @property
    def _has_own_environment(self) -> bool:
        """True for tools that keep each program in an environment of its own, and install it there as a whole."""
        return self.tool.startswith(("pipx", "uv tool"))


def installation() -> Installation:
    """Return how this copy was installed, as far as its metadata say."""
    with suppress(PackageNotFoundError, OSError, ValueError, AttributeError, TypeError):
        found = distribution(DISTRIBUTION)
        installer = (found.read_text("INSTALLER") or "").strip()
        return came_from(json.loads(found.read_text("direct_url.json") or "{}"), _tool(installer))
    return Installation()


def came_from(told: dict[str, Any], tool: str = "pip install") -> Installation:
    """Return the installation that a `direct_url.json` (PEP 610) describes. Raises `ValueError` for another form."""
    url, path = urlsplit(str(told.get("url", ""))), ""
    if len(url.geturl()) > LONGEST or legible(url.geturl()) != url.geturl():
        return Installation(tool=tool)
    # without a name and password: what is printed is shown to others
    place = urlunsplit(url._replace(netloc=url.netloc.rpartition("@")[2] if url.password else url.netloc))
    if url.scheme == "file":
        path = unquote(url.path)
        if "dir_info" in told and (Path(path) / "pyproject.toml").is_file():
            return Installation(path, bool(told["dir_info"].get("editable")), tool=tool)
        return Installation(archive=place if Path(path).is_file() else "", tool=tool)
    if url.scheme not in SCHEMES:
        return Installation(tool=tool)
    if told.get("vcs_info", {}).get("vcs") == "git":
        return Installation(
            repository=place, revision=str(told["vcs_info"].get("requested_revision") or ""), tool=tool
        )
    return Installation(archive=place, tool=tool)


def _tool(installer: str) -> str:
    """Return the command of the tool that has this environment."""
    parts = Path(sys.prefix).parts
    if "pipx" in parts and "venvs" in parts:
        return "pipx install --force"
    if "uv" in parts and "tools" in parts:
        return "uv tool install"
    return "uv pip install" if installer == "uv" else "pip install"


def extra_line(extra: str) -> str:
    """Return the clause for a message that says how to install this copy with an extra."""
    return installation().with_extra(extra)


def upgrade_line() -> str:
    """Return the clause for a message that says how to install a later version."""
    return installation().later()
