"""The commands of a program: their help in groups, and an answer to a word that is none of them."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperGroup

HELP = "help"


class CommandGroup(TyperGroup):
    """List commands by the panel that each was registered with, one whole line each; take `help` for --help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        named: Iterator[tuple[str, Any]] = ((name, self.commands[name]) for name in self.list_commands(ctx))
        commands = {name: command for name, command in named if not command.hidden}
        width = max(map(len, commands), default=0)
        for name, command in commands.items():
            row = (name.ljust(width), command.get_short_help_str(1_000))
            panels.setdefault(command.rich_help_panel or "Commands", []).append(row)
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word, *rest = args
        if word == HELP and not rest:
            typer.echo(ctx.get_help())
            raise typer.Exit
        if word == HELP:
            return self.resolve_command(ctx, [*rest, "--help"])
        if self.get_command(ctx, word) is None and not ctx.resilient_parsing:
            root = ctx.find_root()
            meant = [f"{root.info_name} {path}" for path in alike(word, root.command, self)]
            also = f" Did you mean: {', or '.join(meant)}?" if meant else ""
            ctx.fail(f"No such command '{word}'.{also}")
        return super().resolve_command(ctx, args)


def alike(word: str, root: Any, group: Any) -> list[str]:
    """Return paths of commands below `root`: those named `word`, else those of `group` with a name like it."""
    paths = list(_paths(root))
    same = [path for path, _ in paths if path.rpartition(" ")[2] == word]
    own = dict(_visible(group))
    near = get_close_matches(word, own, n=2)
    return same or [path for name in near for path, command in paths if command is own[name]]


def _visible(group: Any) -> Iterator[tuple[str, Any]]:
    commands = getattr(group, "commands", {})
    return ((name, command) for name, command in commands.items() if not command.hidden)


def _paths(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in _visible(group):
        yield before + name, command
        yield from _paths(command, f"{before}{name} ")
