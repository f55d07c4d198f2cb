"""`noloco`: all that people type. A swarm on this machine, a node, a run, and looks into one that runs anywhere.

The command modules hold options, and import what does the work when a command is called with ones that can be used:
--help and mistakes come at once, and nobody waits for torch who does not need them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from bootstrap.checking.manifest_cli import app as manifest_tools
from bootstrap.creating.backup_cli import backup
from bootstrap.creating.init_cli import init
from bootstrap.creating.invite_cli import delegate, invite, revoke
from bootstrap.creating.tokenizer_cli import tokenizer
from bootstrap.dashboard.dashboard_cli import dashboard, watch
from bootstrap.evaluation.eval_cli import evaluate
from bootstrap.export.export_cli import export
from bootstrap.found_cli import app as founding
from bootstrap.from_lab import command_from_lab, missing_command
from bootstrap.generation.generate_cli import generate
from bootstrap.inspect.inspect_cli import contributors, diagnose, doctor, links, status
from bootstrap.inspect.node_cli import app as node_orders
from bootstrap.local.swarm_cli import swarm
from bootstrap.trace_cli import show_trace
from node.cli import HELP_OPTIONS, with_value_of_compile
from node.cli import node as join
from node.command import App, Version
from node.command_group import CommandGroup
from node.watch.events import set_up_logging

Commands = dict[str, Callable[..., None] | App]
COMMANDS: dict[str, Commands] = {  # as help lists them
    "Try": {"swarm": swarm},
    "Take part": {"join": join, "node": node_orders, "doctor": doctor},
    "Found": {
        "found": founding, "init": init, "tokenizer": tokenizer, "manifest": manifest_tools, "invite": invite,
        "delegate": delegate, "revoke": revoke, "backup": backup,
        "plan": command_from_lab("placement.plan_cli:plan"),
    },
    "Watch": {
        "status": status, "dashboard": dashboard, "watch": watch, "links": links, "contributors": contributors,
        "diagnose": diagnose, "trace": show_trace,
    },
    "Take the model out": {"export": export, "generate": generate, "eval": evaluate},
    "Study": {"simulate": command_from_lab("simulation.simulate_cli:app")},
}  # fmt: skip
PROGRAMS: Commands = {
    "noloco-node": join,
    "noloco-bootstrap": founding,
}  # typed after noloco, they are understood
CONTEXTS: dict[Any, dict[str, Any]] = {
    join: HELP_OPTIONS,
    missing_command: {"allow_extra_args": True, "ignore_unknown_options": True},
}


class _InOrder(CommandGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [name for commands in COMMANDS.values() for name in commands]


def _register(name: str, command: Callable[..., None] | App, panel: str | None) -> None:
    settings: dict[str, Any] = {"rich_help_panel": panel, "hidden": panel is None}
    if isinstance(command, App):
        app.add_typer(command, name=name, **settings)
    else:
        app.command(name, context_settings=CONTEXTS.get(command), **settings)(command)


app = App(cls=_InOrder, no_args_is_help=True)
for _panel, _commands in COMMANDS.items():
    for _name, _command in _commands.items():
        _register(_name, _command, _panel)
for _name, _command in PROGRAMS.items():
    _register(_name, _command, None)


@app.callback()
def noloco(version: Version = False) -> None:
    """Train a model together with others: join a run, found or watch one.

    Example: noloco help join
    """
    set_up_logging(verbose=False)


def main() -> None:
    app(args=with_value_of_compile(sys.argv[1:]))


if __name__ == "__main__":
    main()
