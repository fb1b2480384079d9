"""The cluster, plans of moves between its nodes, and its connected clients."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from millstream.client.admin.clients import ConnectedClient, list_clients
from millstream.client.admin.cluster_plans import (
    apply_plan,
    cancel_plan,
    compute_plan,
    copied_bytes,
    current_plan,
    describe_plan,
    describe_progress,
    propose_plan,
    undrain,
)
from millstream.client.admin.cluster_status import ClusterNode, ReplicaBehind, UnhealthyPartition, cluster_status
from millstream.core.cluster_plan import BALANCE, THROTTLE_BYTES
from millstream.core.errors import InvalidRequest
from millstream.gateway.api.route import NoFields, Request, Route
from millstream.gateway.api.services import Services


class ClusterDescription(msgspec.Struct, frozen=True):
    """The state of the cluster."""

    cluster: str
    controller: int | None
    nodes: list[ClusterNode]
    partitions: int
    without_leader: list[UnhealthyPartition]
    under_replicated: list[UnhealthyPartition]
    behind: list[ReplicaBehind]
    warnings: list[str]


class ClientQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The connections to list, and the time for which their rates are measured."""

    interval_ms: Annotated[int, Meta(ge=0, le=10_000)] = 500
    all: Annotated[bool, Meta(description="Include connections that neither produce nor consume.")] = False


class ClientList(msgspec.Struct, frozen=True):
    """Connections to all nodes, and how many the list omits."""

    clients: list[ConnectedClient]
    omitted: int


class PlanToCompute(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The kind of plan: to drain or remove a node, or to balance all of them."""

    kind: Literal["drain", "remove", "balance"]
    node: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    throttle_bytes_per_s: Annotated[int, Meta(ge=1024, le=2**62)] = THROTTLE_BYTES


class MovingPartition(msgspec.Struct, frozen=True):
    """A partition, its current replicas, and its planned replicas."""

    topic: str
    partition: int
    before: list[int] = msgspec.field(name="from")
    target: list[int] = msgspec.field(name="to")


class ComputedMove(MovingPartition, frozen=True):
    """A planned move, and the number of bytes that it copies."""

    bytes: int


class ComputedPlan(msgspec.Struct, frozen=True):
    """A plan that waits to be applied; `plan` is null if there is nothing to move."""

    plan: str | None
    kind: str
    subject: str
    moves: list[ComputedMove]
    bytes: int
    throttle_bytes_per_s: int
    seconds: float
    staying: list[str]
    risks: list[str]


class PlanProgress(msgspec.Struct, frozen=True):
    """The last plan, its progress, and the drained nodes."""

    plan: str | None
    kind: str | None
    subject: str
    state: str | None
    throttle_bytes_per_s: int
    moves: int
    moved: int
    moving: int
    waiting: int
    superseded: int
    bytes: int
    moved_bytes: int
    partitions_moving: list[MovingPartition]
    created_ms: int
    finished_ms: int | None
    drained: list[int]


class PlanToApply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The plan to apply, by default the last one, and its throttle."""

    plan: Annotated[str, Meta(max_length=64)] = ""
    throttle_bytes_per_s: Annotated[int, Meta(ge=1024, le=2**62)] | None = None


class PlanToCancel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The plan to cancel, by default the last one."""

    plan: Annotated[str, Meta(max_length=64)] = ""


class PlanState(msgspec.Struct, frozen=True):
    """A plan and its state."""

    plan: str
    state: str


class DrainedNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A drained node."""

    node: Annotated[int, Meta(ge=0, le=2**31 - 1)]


async def status(services: Services, request: Request[NoFields, NoFields]) -> ClusterDescription:
    return msgspec.convert((await cluster_status(services.client)).described(), ClusterDescription)


async def clients(services: Services, request: Request[ClientQuery, NoFields]) -> ClientList:
    connected = await list_clients(services.client, interval_s=request.query.interval_ms / 1000)
    return ClientList([client for client in connected.clients if request.query.all or client.roles], connected.omitted)


async def show_plan(services: Services, request: Request[NoFields, NoFields]) -> PlanProgress:
    current = await current_plan(services.client)
    copied = await copied_bytes(services.client, current)
    return msgspec.convert(describe_progress(current, copied), PlanProgress)


async def make_plan(services: Services, request: Request[NoFields, PlanToCompute]) -> ComputedPlan:
    """Compute a plan, and keep it for `apply`."""
    body = request.body
    if body.kind != BALANCE and body.node is None:
        raise InvalidRequest(f"to {body.kind} a node, name it in `node`")
    plan = await compute_plan(services.client, body.kind, node=body.node)
    plan_id = None
    if plan.moves or body.kind != BALANCE:
        plan_id = (await propose_plan(services.client, plan, throttle_bytes=body.throttle_bytes_per_s)).plan_id
    document = describe_plan(plan, plan_id=plan_id, throttle_bytes=body.throttle_bytes_per_s)
    return msgspec.convert(document, ComputedPlan)


async def run_plan(services: Services, request: Request[NoFields, PlanToApply]) -> PlanState:
    """Apply a plan; the cluster carries it out."""
    body = request.body
    applied = await apply_plan(services.client, body.plan, throttle_bytes=body.throttle_bytes_per_s)
    return PlanState(applied.plan_id, applied.state)


async def stop_plan(services: Services, request: Request[NoFields, PlanToCancel]) -> PlanState:
    cancelled = await cancel_plan(services.client, request.body.plan)
    return PlanState(cancelled.plan_id, cancelled.state)


async def undrain_node(services: Services, request: Request[NoFields, DrainedNode]) -> DrainedNode:
    """Allow leaders and replicas on a drained node again."""
    await undrain(services.client, request.body.node)
    return request.body


ROUTES: Final = (
    Route("GET", "/cluster", "Describe the cluster", status, ClusterDescription),
    Route("GET", "/clients", "List connected clients", clients, ClientList, query=ClientQuery, tag="cluster"),
    Route("GET", "/cluster/plan", "Show the last plan and its progress", show_plan, PlanProgress),
    Route(
        "POST",
        "/cluster/plan",
        "Compute a plan to drain or remove a node, or to balance all of them",
        make_plan,
        ComputedPlan,
        body=PlanToCompute,
    ),
    Route("POST", "/cluster/plan/apply", "Carry out a plan", run_plan, PlanState, body=PlanToApply),
    Route("POST", "/cluster/plan/cancel", "Stop a plan", stop_plan, PlanState, body=PlanToCancel),
    Route(
        "POST",
        "/cluster/undrain",
        "Undrain a node, so that it may get leaders and replicas again",
        undrain_node,
        DrainedNode,
        body=DrainedNode,
    ),
)
