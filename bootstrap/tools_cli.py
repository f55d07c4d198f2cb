"""`noloco`: tools for people. A swarm on this machine, and looks into one that runs anywhere.

The command modules hold options, and import what does the work when a command is called with ones that can be used:
--help and mistakes come at once, and nobody waits for torch who does not need them.
"""

from __future__ import annotations

from bootstrap.checking.manifest_cli import app as manifest_tools
from bootstrap.dashboard.dashboard_cli import dashboard, watch
from bootstrap.evaluation.eval_cli import evaluate
from bootstrap.export.export_cli import export
from bootstrap.generation.generate_cli import generate
from bootstrap.inspect.inspect_cli import contributors, diagnose, doctor, links, status
from bootstrap.inspect.node_cli import app as node_orders
from bootstrap.local.swarm_cli import swarm
from bootstrap.placement.plan_cli import plan
from bootstrap.simulation.simulate_cli import app as simulate
from bootstrap.trace_cli import show_trace
from node.command import App, Version
from node.watch.events import set_up_logging

app = App(no_args_is_help=True)
app.add_typer(manifest_tools, name="manifest")
app.add_typer(simulate, name="simulate")
app.add_typer(node_orders, name="node")
app.command("trace")(show_trace)
app.command()(swarm)
app.command()(plan)
app.command()(status)
app.command()(dashboard)
app.command()(watch)
app.command()(links)
app.command()(contributors)
app.command()(doctor)
app.command()(diagnose)
app.command()(export)
app.command()(generate)
app.command("eval")(evaluate)


@app.callback()
def noloco(version: Version = False) -> None:
    """Tools around a noloco run: try it on this machine, watch it, measure it, take the model out.

    Example: noloco swarm
    """
    set_up_logging(verbose=False)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
