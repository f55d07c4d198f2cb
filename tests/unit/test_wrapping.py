"""Sentences break between words on a terminal, and what is to be copied stays in one piece."""

from __future__ import annotations

import io

import pytest

from node.watch.words import wrapped


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


SENTENCE = (
    "error: The name of the run cannot have spaces in it, for it stands in addresses, files and tables. "
    "Choose another."
)
ADDRESS = "    noloco join /ip4/203.0.113.7/tcp/31337/p2p/12D3KooWB1nCVQyW3BE4zaVYJexq3mR44ZNQQNjX5Q1yseqVU9z4 --port"


@pytest.mark.parametrize("columns", ["80", "40"])
def test_no_word_is_cut_and_no_address(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = wrapped(f"{SENTENCE}\n{ADDRESS}\nDone.", Terminal()).split("\n")
    assert lines[-2:] == [ADDRESS, "Done."]
    assert " ".join(lines[:-2]) == SENTENCE
    assert max(map(len, lines[:-2])) <= int(columns)


def test_a_pipe_and_a_file_get_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert wrapped(SENTENCE, io.StringIO()) == SENTENCE


def test_a_log_line_goes_on_below_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = wrapped(f"12:00:00  {SENTENCE}", Terminal(), later=" " * 10).split("\n")
    assert len(lines) > 1
    assert all(line.startswith(" " * 10) and len(line) <= 60 for line in lines[1:])
