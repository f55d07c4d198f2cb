"""The prompt of `noloco generate`: as an argument and on standard input it is read in the same way."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bootstrap.generation import writing
from bootstrap.tools_cli import app
from node.command import App

PROMPTS = [
    b"once",
    "größer 中文".encode(),
    b"caf\xe9",
    b"\xff\xfe",
    b"\xe4\xb8 cut",
    b" two\nlines\n",
    b"\xed\xa0\xbd",
]


@pytest.mark.parametrize("raw", PROMPTS)
def test_bytes_that_are_no_text_are_replaced_alike(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(writing, "generate_from_export", lambda _, prompt, decoding: seen.append(prompt))
    argument = raw.decode("utf-8", errors="surrogateescape")  # as Python makes one of the command line
    as_file = "\ufeff".encode() + raw  # what some editors save
    for words, given in (([argument], b""), (["-"], raw), ([], raw), ([], as_file)):
        answer = CliRunner().invoke(app, ["generate", *words, "--model", "somewhere"], input=given)
        assert answer.exit_code == 0, answer.output
    assert seen == [raw.decode("utf-8", errors="replace")] * 4


def test_a_path_that_is_not_utf8_can_be_told_on_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", out)
    commands = App()

    @commands.command()
    def tell(place: Path) -> None:
        typer.echo(place)

    commands(["caf\udce9"], standalone_mode=False)
    out.flush()
    assert out.buffer.getvalue() == b"caf\\udce9\n"  # type: ignore[attr-defined]
