"""The settings that few need, shown by a command in a process of its own."""

from __future__ import annotations


def test_the_settings_that_few_need_are_there_for_those_who_do() -> None:
    """In a process of its own, since options are made when the command is imported."""
    import subprocess
    import sys

    command = [sys.executable, "-m", "node.cli"]
    usual, whole = (
        subprocess.run([*command, flag], capture_output=True, text=True, check=True).stdout
        for flag in ("--help", "--help-all")
    )
    assert "--precision" not in usual
    assert "--precision" in whole
