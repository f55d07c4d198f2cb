"""Every tool that looks at a run takes a token, by option or from the environment, and says when it is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bootstrap.tools_cli import app
from node.membership.entry import TokenSource
from protocol.access.tokens import Token
from protocol.errors import TokenError
from protocol.records.identity import Identity

TOKEN = Token.issue("f" * 32, Identity.from_seed("a run"), None, 1, 1e10).to_text()
ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWB1nCVQyW3BE4zaVYJexq3mR44ZNQQNjX5Q1yseqVU9z4"
REFUSAL = "The members do not let this peer in: it is used up. Ask the run's owner for a token."
TOOLS = {  # what is typed beside --join, and where it visits the run
    "status": ("", "inspect.status.visit"),
    "links": ("", "inspect.link_map.visit"),
    "contributors": ("", "inspect.contributors.visit"),
    "watch": ("--events curves.jsonl", "dashboard.watching.visit"),
    "dashboard": ("--listen 127.0.0.1:0", "dashboard.running.visit"),
    "diagnose": ("--out report.json", "inspect.diagnosing.visit"),
    "doctor": ("", "inspect.doctor.network"),
    "export": ("--out model", "export.exporting.visit"),
    "generate": ("once", "generation.writing.visit"),
    "eval": ("", "evaluation.measuring.visit"),
    "plan": ("", "lab.placement.live_plan.visit"),
    "plan --begin-anew 1": ("--publish run", "lab.placement.plan_run.visit"),
    "manifest check": ("", "checking.machine_tables.look_at"),
}


def refusing(shown: list[str]) -> Any:
    """What stands in for a visit: it notes the token, and is refused."""

    @asynccontextmanager
    async def visit(
        join: Sequence[str], token: str = "", directories: Sequence[Path] = ()
    ) -> AsyncIterator[Any]:
        shown.append(token)
        raise TokenError(REFUSAL)
        yield

    return visit


def looking(shown: list[str]) -> Any:
    async def look_at(join: Sequence[str], token: str, *, measures: bool) -> Any:
        shown.append(token)
        raise TokenError(REFUSAL)

    return look_at


def checking(shown: list[str]) -> Any:
    async def network(join: Sequence[str], host: str, port: int, token: TokenSource) -> AsyncIterator[Any]:
        assert not isinstance(token, str)
        shown.append(token(None))  # type: ignore[arg-type] # one that is given is not looked for
        raise TokenError(REFUSAL)
        yield

    return network


@pytest.mark.parametrize("where", ["option", "environment"])
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_shows_the_token_and_ends_with_the_refusal(
    tool: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed, place = TOOLS[tool]
    shown: list[str] = []
    stand_in = {"look_at": looking, "network": checking}.get(place.rpartition(".")[2], refusing)
    monkeypatch.setattr(f"bootstrap.{place}", stand_in(shown))
    monkeypatch.chdir(tmp_path)
    arguments = [*tool.split(), *typed.split(), "--join", ADDRESS]
    is_typed = where == "option"
    if is_typed:
        arguments += ["--token", TOKEN]
    answer = CliRunner().invoke(app, arguments, env={"NOLOCO_TOKEN": "noloco-another" if is_typed else TOKEN})
    assert shown == [TOKEN], answer.output
    assert answer.exit_code == 2
    assert answer.output.count(REFUSAL) == 1
    assert "nobody trains" not in answer.output
