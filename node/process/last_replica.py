"""Tells a volunteer whose node is the last that has its stage's state what it costs when the node goes."""

from __future__ import annotations

from node.service.node_resources import NodeResources
from node.service.service import Service
from node.watch.words import duration


def is_last_of_stage(service: Service) -> bool:
    """Return whether no other member is known that has the stage's state, while it is still needed."""
    context = service.context
    if service.public_state != "serving" or not service.replica.step:
        return False
    holding = context.view.holding(context.stage, context.transport.now())
    return all(peer == context.me for peer in holding)


def what_leaving_costs(member: NodeResources, service: Service) -> str:
    """A sentence on what the run loses while this node is away; empty where others have the stage's state."""
    if not is_last_of_stage(service):
        return ""
    state = member.surroundings.state
    kept = "It is kept nowhere" if state is None else f"It is saved in {state.path}"
    if service.context.counters.cannot_save:
        kept += ", where the last checkpoint could not be written"
    wait = duration(member.signed.manifest.limits.stage_return).replace(".0 ", " ")
    return (
        f"This node is the last that has the state of stage {service.stage} (step {service.replica.step:,}): without "
        f"it nobody trains. {kept}; others wait for it for {wait} before they begin the stage anew."
    )
