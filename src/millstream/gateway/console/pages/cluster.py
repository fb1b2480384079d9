"""The cluster: nodes, partitions in trouble, plans that move partitions between nodes, transactions, clients."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from millstream.client.admin import cluster_plans
from millstream.client.admin.browse import node_summaries
from millstream.client.admin.clients import list_clients
from millstream.client.admin.cluster_status import AWAY, UNREACHABLE, ClusterStatus, cluster_status
from millstream.client.admin.transactions import (
    OPEN_STATES,
    abort_on_partition,
    abort_transaction,
    describe_transaction,
    hanging_transactions,
    list_transactions,
)
from millstream.core.acl import Operation, ResourceType
from millstream.core.cluster_plan import BALANCE, DRAIN, REMOVE, THROTTLE_BYTES
from millstream.core.errors import InvalidRequest, MillstreamError, NotAuthorized
from millstream.core.ids import PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.gateway.api.problem import invalid
from millstream.gateway.console.visit import Done, Page, PageRoute, Response, Visit, address, change, done
from millstream.protocol.private.plan_messages import PlannedMove, PlanResponse

SHOWN: Final = 200
MEASURED_S: Final = 0.5
MIB: Final = 1024 * 1024
_KINDS: Final = (BALANCE, DRAIN, REMOVE)


async def cluster(visit: Visit) -> Response:
    """Show the nodes, and unhealthy partitions; all partitions are examined only if some are unhealthy."""
    client = visit.services.client
    nodes = await visit.shared(lambda: node_summaries(client))
    known = (await client.metadata([])).nodes
    places = {int(node_id): f"{node.host}:{node.port}" for node_id, node in known.items()}
    status: ClusterStatus | None = None
    if any(node.without_leader or node.under_replicated or node.state == UNREACHABLE for node in nodes):
        status = await cluster_status(client)
    context = {
        "nodes": nodes,
        "places": places,
        "racks": {int(node_id): node.rack for node_id, node in known.items()},
        "partitions": max((node.partitions for node in nodes), default=0),
        "warnings": sorted({text for node in nodes for text in node.warnings}),
        "away": [] if status is None else [node for node in status.nodes if node.state == AWAY],
        "troubled": [] if status is None else status.troubled[:SHOWN],
        "behind": [] if status is None else status.behind[:SHOWN],
        "more": 0 if status is None else max(0, len(status.troubled) - SHOWN),
    }
    return Page("cluster.html", context)


async def show_plan(visit: Visit) -> Response:
    try:
        current = await cluster_plans.current_plan(visit.services.client)
    except InvalidRequest as error:
        # A single node has no plans.
        return Page("plan.html", {"problem": str(error)})
    may_change = await visit.may_change(Operation.ALTER, ResourceType.CLUSTER)
    return Page("plan.html", await _plan_context(visit, current, may_change=may_change))


async def _plan_context(
    visit: Visit, current: PlanResponse, *, may_change: bool, computed: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the variables of the page for a plan; `computed` is its cost, if it was just computed."""
    copied = await cluster_plans.copied_bytes(visit.services.client, current)
    return {
        "problem": "",
        "plan": cluster_plans.describe_progress(current, copied),
        "moves": list(current.moves[:SHOWN]),
        "omitted": max(0, len(current.moves) - SHOWN),
        "computed": computed,
        "nodes": sorted(int(node) for node in (await visit.services.client.metadata([])).nodes),
        "may_change": may_change,
        "throttle_mib": (current.throttle_bytes or THROTTLE_BYTES) // MIB,
    }


async def propose_plan(visit: Visit) -> Response:
    """Compute a plan and store it for review; nothing moves yet."""
    kind = visit.choice("kind", _KINDS)
    node = visit.number("node", -1) if kind != BALANCE else None
    if node is not None and node < 0:
        raise invalid(f"choose the node to {kind}")
    throttle = visit.number("throttle", THROTTLE_BYTES // MIB, low=1, high=1_000_000) * MIB
    client = visit.services.client
    plan = await cluster_plans.compute_plan(client, kind, node=node)
    if not plan.moves and kind == BALANCE:
        return _plan_done("The cluster is balanced; there is nothing to move", "cluster", "plan", kind)
    proposed = await cluster_plans.propose_plan(client, plan, throttle_bytes=throttle)
    document = cluster_plans.describe_plan(plan, plan_id=proposed.plan_id, throttle_bytes=throttle)
    # The response names the plan; its moves are those that were just computed.
    shown = msgspec.structs.replace(proposed, moves=[PlannedMove(move) for move in plan.moves])
    return Page("plan.html", await _plan_context(visit, shown, may_change=True, computed=document))


async def apply_plan(visit: Visit) -> Response:
    """Apply the plan; the cluster carries it out."""
    plan_id = visit.text("plan", length_max=100)
    throttle = visit.number("throttle", 0, high=1_000_000) * MIB
    await cluster_plans.apply_plan(visit.services.client, plan_id, throttle_bytes=throttle or None)
    flags = ("--throttle", throttle) if throttle else ()
    return _plan_done(f"Plan {plan_id} is running", "cluster", "apply", plan_id, *flags)


async def cancel_plan(visit: Visit) -> Response:
    plan_id = visit.text("plan", length_max=100)
    visit.confirm(plan_id)
    cancelled = await cluster_plans.cancel_plan(visit.services.client, plan_id)
    return _plan_done(f"Plan {plan_id} is {cancelled.state}", "cluster", "cancel", plan_id)


async def undrain(visit: Visit) -> Response:
    """Allow leaders and replicas on a drained node again."""
    node = visit.number("node", -1)
    await cluster_plans.undrain(visit.services.client, node)
    return _plan_done(f"Node {node} may get leaders and replicas again", "cluster", "undrain", node)


def _plan_done(text: str, *words: object) -> Done:
    return done(address("cluster", "plan"), text, *words)


async def transactions(visit: Visit) -> Response:
    """Show open transactions and, if asked for, those that no coordinator will end: that looks at every partition."""
    client = visit.services.client
    only_open = visit.text("all") != "1"
    listed = await list_transactions(client, states=sorted(OPEN_STATES) if only_open else ())
    rows = []
    for node in visit.on_page(listed):
        try:
            rows.append(
                (node, await describe_transaction(client, node.transactional_id) if node.state in OPEN_STATES else None)
            )
        except MillstreamError:
            # It ended meanwhile.
            rows.append((node, None))
    kind = ResourceType.TRANSACTIONAL_ID
    names = [transaction.transactional_id for transaction, described in rows if described is not None]
    await visit.look_up(*((Operation.WRITE, kind, name) for name in names))
    hanging, problem, with_hanging = [], "", visit.text("hanging") == "1"
    try:
        hanging = await hanging_transactions(client) if with_hanging else []
    except NotAuthorized as error:
        problem = str(error)
    context = {
        **visit.paging(len(listed)),
        "transactions": rows,
        "only_open": only_open,
        "hanging": hanging[:SHOWN],
        "looked": with_hanging,
        "problem": problem,
        "may_abort": {name for name in names if await visit.may_change(Operation.WRITE, kind, name)},
        "may_end": await visit.may_change(Operation.ALTER, ResourceType.CLUSTER),
    }
    return Page("transactions.html", context)


async def abort(visit: Visit) -> Response:
    """Abort a transaction, or end a hanging one on a partition."""
    client = visit.services.client
    if name := visit.text("transaction"):
        visit.confirm(name)
        before = await abort_transaction(client, name)
        return done(address("transactions"), f"{name} is aborted; it was {before}", "transaction", "abort", name)
    topic, partition = visit.text("topic"), visit.number("partition", 0)
    producer = visit.number("producer", 0, high=2**63 - 1)
    if not topic:
        raise invalid("name a transaction, or a topic, a partition and a producer")
    visit.confirm(topic)
    await abort_on_partition(client, TopicPartition(topic, PartitionIndex(partition)), producer)
    words = ("transaction", "abort", "--topic", topic, "--partition", partition, "--producer-id", producer)
    return done(address("transactions"), f"The transaction of producer {producer} is ended", *words)


async def clients(visit: Visit) -> Response:
    connected = await list_clients(visit.services.client, interval_s=MEASURED_S)
    every = visit.text("all") == "1"
    shown = [client for client in connected.clients if every or client.roles]
    context = {
        **visit.paging(len(shown)),
        "clients": visit.on_page(shown),
        "omitted": connected.omitted,
        "every": every,
    }
    return Page("clients.html", context)


ROUTES: Final = (
    PageRoute(path="/cluster", handle=cluster),
    PageRoute(path="/cluster/plan", handle=show_plan),
    change("/cluster/plan", propose_plan),
    change("/cluster/plan/apply", apply_plan),
    change("/cluster/plan/cancel", cancel_plan),
    change("/cluster/plan/undrain", undrain),
    PageRoute(path="/transactions", handle=transactions),
    change("/transactions/abort", abort),
    PageRoute(path="/clients", handle=clients),
)
