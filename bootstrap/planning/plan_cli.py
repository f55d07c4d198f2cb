"""`noloco plan`: which device takes which stage, from measured links or from a running swarm."""

from __future__ import annotations

from bootstrap.placement.method_names import DEFAULT
from bootstrap.planning import plan_options as option
from bootstrap.planning.plan_options import PlanRequest
from node.command import fail
from protocol.errors import NolocoError


def plan(
    scenario: option.ScenarioFile = None,
    join: option.Join = None,
    publish: option.Publish = None,
    hours: option.Hours = 6.0,
    stages: option.Stages = None,
    replicas: option.Replicas = None,
    objective: option.Objective = "noloco",
    method: option.Method = DEFAULT,
    seconds: option.Seconds = 20.0,
    evaluations: option.Evaluations = None,
    seed: option.Seed = 0,
    uniform: option.Uniform = 1.0,
    mixing: option.Mixing = 0.5,
    microbatches: option.Microbatches = None,
    in_flight: option.InFlight = 16,
    k: option.InnerSteps = None,
    compare: option.Compare = False,
    seeds: option.Seeds = 3,
    picture: option.Picture = None,
    as_json: option.AsJson = False,
) -> None:
    """Place devices in pipeline stages so that training waits least for the network."""
    request = PlanRequest(**locals())
    try:
        request.check()
        from bootstrap.planning.making import make_and_show

        make_and_show(request)
    except NolocoError as error:
        fail(error)
