"""`noloco-node`: the command that a volunteer starts.

It imports what trains, torch above all, once the settings are known to be usable: --help and mistakes come at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from node.command import fail, options_from, run_async
from node.config import NodeConfig, build_config
from node.machine.limits import require_room_to_start
from node.machine.processes import end_process
from protocol.errors import NolocoError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_from(NodeConfig)
def node(
    config: Annotated[Path | None, typer.Option(help="Settings file (TOML).", show_default=False)] = None,
    **flags: object,
) -> None:
    """Train one pipeline stage of a run together with other volunteers.

    Every setting can also be given as NOLOCO_<NAME> in the environment.
    """
    try:
        settings = build_config(flags, file=config)
        require_room_to_start()
    except NolocoError as error:
        fail(error)
    from node.serving import start

    run_async(start(settings))
    end_process()


def main() -> None:
    app()


if __name__ == "__main__":
    main()
