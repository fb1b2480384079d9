"""Plans that move partitions between nodes: compute, review, apply, follow, cancel."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from millstream.client.admin import cluster_plans
from millstream.core.acl import Operation, ResourceType
from millstream.core.cluster_plan import BALANCE, DRAIN, REMOVE, THROTTLE_BYTES
from millstream.core.errors import InvalidRequest
from millstream.gateway.api.problem import invalid
from millstream.gateway.console.visit import Done, Page, PageRoute, Response, Visit, address, change, done
from millstream.protocol.private.plan_messages import PlannedMove, PlanResponse

MOVES_SHOWN: Final = 200
MIB: Final = 1024 * 1024
_KINDS: Final = (BALANCE, DRAIN, REMOVE)


async def show(visit: Visit) -> Response:
    """Show the last plan, and how far it is."""
    try:
        current = await cluster_plans.current_plan(visit.services.client)
    except InvalidRequest as error:
        # A single node has no plans.
        return Page("plan.html", {"problem": str(error)})
    may_change = await visit.may_change(Operation.ALTER, ResourceType.CLUSTER)
    return Page("plan.html", await _context(visit, current, may_change=may_change))


async def _context(
    visit: Visit, current: PlanResponse, *, may_change: bool, computed: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the variables of the page for a plan; `computed` is its cost, if it was just computed."""
    copied = await cluster_plans.copied_bytes(visit.services.client, current)
    return {
        "problem": "",
        "plan": cluster_plans.describe_progress(current, copied),
        "moves": list(current.moves[:MOVES_SHOWN]),
        "omitted": max(0, len(current.moves) - MOVES_SHOWN),
        "computed": computed,
        "nodes": sorted(int(one) for one in (await visit.services.client.metadata([])).nodes),
        "may_change": may_change,
        "throttle_mib": (current.throttle_bytes or THROTTLE_BYTES) // MIB,
    }


async def propose(visit: Visit) -> Response:
    """Compute a plan and store it for review; nothing moves yet."""
    kind = visit.choice("kind", _KINDS)
    node = visit.number("node", -1) if kind != BALANCE else None
    if node is not None and node < 0:
        raise invalid(f"choose the node to {kind}")
    throttle = visit.number("throttle", THROTTLE_BYTES // MIB, low=1, high=1_000_000) * MIB
    client = visit.services.client
    plan = await cluster_plans.compute_plan(client, kind, node=node)
    if not plan.moves and kind == BALANCE:
        return _done("The cluster is balanced; there is nothing to move", "cluster", "plan", kind)
    proposed = await cluster_plans.propose_plan(client, plan, throttle_bytes=throttle)
    document = cluster_plans.describe_plan(plan, plan_id=proposed.plan_id, throttle_bytes=throttle)
    # The response names the plan; its moves are those that were just computed.
    shown = msgspec.structs.replace(proposed, moves=[PlannedMove(move) for move in plan.moves])
    return Page("plan.html", await _context(visit, shown, may_change=True, computed=document))


async def apply(visit: Visit) -> Response:
    """Apply the plan; the cluster carries it out."""
    plan_id = visit.text("plan", length_max=100)
    throttle = visit.number("throttle", 0, high=1_000_000) * MIB
    await cluster_plans.apply_plan(visit.services.client, plan_id, throttle_bytes=throttle or None)
    flags = ("--throttle", throttle) if throttle else ()
    return _done(f"Plan {plan_id} is running", "cluster", "apply", plan_id, *flags)


async def cancel(visit: Visit) -> Response:
    plan_id = visit.text("plan", length_max=100)
    visit.confirm(plan_id)
    cancelled = await cluster_plans.cancel_plan(visit.services.client, plan_id)
    return _done(f"Plan {plan_id} is {cancelled.state}", "cluster", "cancel", plan_id)


async def undrain(visit: Visit) -> Response:
    """Allow leaders and replicas on a drained node again."""
    node = visit.number("node", -1)
    await cluster_plans.undrain(visit.services.client, node)
    return _done(f"Node {node} may get leaders and replicas again", "cluster", "undrain", node)


def _done(text: str, *words: object) -> Done:
    return done(address("cluster", "plan"), text, *words)


ROUTES: Final = (
    PageRoute(path="/cluster/plan", handle=show),
    change("/cluster/plan", propose),
    change("/cluster/plan/apply", apply),
    change("/cluster/plan/cancel", cancel),
    change("/cluster/plan/undrain", undrain),
)
