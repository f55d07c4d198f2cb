"""`noloco plan`: which device takes which stage, from measured links or from a running swarm."""

from __future__ import annotations

import inspect
from typing import Any

from bootstrap.lab.placement.request import PlanRequest
from node.command import doing, fail
from protocol.errors import NolocoError


def plan(**options: Any) -> None:
    """Place devices in stages so that training waits least.

    Example: noloco plan --scenario links.json --stages 8
    """
    try:
        request = PlanRequest(**options)
        request.check()
        doing("Getting ready to plan")
        from bootstrap.lab.placement.plan_run import make_and_show

        make_and_show(request)
    except NolocoError as error:
        fail(error)


plan.__dict__["__signature__"] = inspect.signature(PlanRequest, eval_str=True)  # of which typer makes options
