"""Plans of a cluster: measure its load, compute a plan, and let the cluster carry it out."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from millstream.core.cluster_plan import (
    BALANCE,
    DRAIN,
    REMOVE,
    THROTTLE_BYTES,
    ClusterLoad,
    NodeLoad,
    PartitionLoad,
    Plan,
    plan_balance,
    plan_drain,
    plan_remove,
    plan_replicate,
)
from millstream.core.errors import InvalidRequest, MillstreamError, UnknownTopic
from millstream.core.ids import NodeId
from millstream.protocol.messages.codec import build_request
from millstream.protocol.private.message import request_private
from millstream.protocol.private.plan_messages import (
    ApplyPlanRequest,
    CancelPlanRequest,
    DescribePlanRequest,
    PlanResponse,
    ProposePlanRequest,
    UndrainRequest,
)

if TYPE_CHECKING:
    from millstream.protocol.wire.client import Client

RATE_INTERVAL_S = 1.0
"""How long write rates are measured."""


@dataclass(frozen=True, slots=True)
class _Disk:
    sizes: Mapping[tuple[str, int], int]
    total_bytes: int
    free_bytes: int


async def measure_load(client: Client, *, interval_s: float = RATE_INTERVAL_S) -> ClusterLoad:
    """Ask every node for its sizes twice; the difference gives the write rates."""
    metadata = await client.metadata()
    plan = await current_plan(client)
    first = await _disks(client, metadata.nodes)
    loop = asyncio.get_running_loop()
    started = loop.time()
    await asyncio.sleep(interval_s)
    disks = await _disks(client, metadata.nodes)
    elapsed_s = max(loop.time() - started, 1e-3)
    known = {
        *metadata.nodes,
        *(
            node
            for topic in metadata.topics.values()
            for partition in topic.partitions.values()
            for node in partition.replicas
        ),
    }
    partitions = []
    for topic in metadata.topics.values():
        for partition in topic.partitions.values():
            place = (topic.name, int(partition.partition))
            size = max((disks[node].sizes.get(place, 0) for node in partition.replicas if node in disks), default=0)
            growth = [
                disks[node].sizes.get(place, 0) - first[node].sizes.get(place, 0)
                for node in (partition.leader_id,)
                if node in disks and node in first
            ]
            partitions.append(
                PartitionLoad(
                    topic=topic.name,
                    topic_id=topic.topic_id,
                    index=partition.partition,
                    replicas=partition.replicas,
                    in_sync=partition.in_sync,
                    size_bytes=size,
                    bytes_per_s=max(0, *growth, 0) / elapsed_s,
                )
            )
    nodes = {}
    for node_id in sorted(known):
        live, disk = metadata.nodes.get(node_id), disks.get(node_id)
        nodes[node_id] = NodeLoad(
            node_id=node_id,
            rack=plan.racks.get(node_id) if live is None else live.rack,
            is_live=live is not None,
            machine=plan.machines.get(node_id),
            is_drained=node_id in plan.drained,
            disk_bytes=0 if disk is None else disk.total_bytes,
            disk_free_bytes=0 if disk is None else disk.free_bytes,
        )
    return ClusterLoad(nodes=nodes, partitions=partitions)


async def _disks(client: Client, nodes: Iterable[NodeId]) -> dict[NodeId, _Disk]:
    nodes = sorted(nodes)
    responses = await asyncio.gather(*(_disk(client, node) for node in nodes))
    return {node: response for node, response in zip(nodes, responses, strict=True) if response is not None}


async def _disk(client: Client, node: NodeId) -> _Disk | None:
    try:
        response = await client.send(node, build_request("describe_log_dirs", 4))
    except MillstreamError:
        # A node that has just died: the plan is computed without its sizes.
        return None
    sizes: Counter[tuple[str, int]] = Counter()
    total = free = 0
    for result in response.results:
        if result.error_code:
            continue
        total, free = total + max(0, result.total_bytes), free + max(0, result.usable_bytes)
        for topic in result.topics:
            for partition in topic.partitions:
                sizes[topic.name, partition.partition_index] += partition.partition_size
    return _Disk(sizes, total, free)


async def compute_plan(client: Client, kind: str, *, node: int | None = None) -> Plan:
    load = await measure_load(client)
    if kind == BALANCE:
        # With thousands of partitions it takes seconds, and a gateway serves others meanwhile.
        return await asyncio.to_thread(plan_balance, load)
    planners: dict[str, Callable[[ClusterLoad, NodeId], Plan]] = {DRAIN: plan_drain, REMOVE: plan_remove}
    if kind not in planners or node is None:
        raise InvalidRequest(f"the kind of a plan must be drain, remove or balance, not {kind!r}")
    return planners[kind](load, NodeId(node))


async def compute_replication(client: Client, pattern: str, to: int) -> Plan:
    """Compute a plan to give every topic that matches a pattern this many replicas."""
    load = await measure_load(client, interval_s=0)
    topics = {partition.topic for partition in load.partitions if fnmatchcase(partition.topic, pattern)}
    if not topics:
        raise UnknownTopic(f"no topic matches {pattern!r}; see `millstream topic list`")
    return plan_replicate(load, topics, to)


async def propose_plan(client: Client, plan: Plan, *, throttle_bytes: int = THROTTLE_BYTES) -> PlanResponse:
    request = ProposePlanRequest(kind=plan.kind, subject=plan.subject, moves=plan.moves, throttle_bytes=throttle_bytes)
    return await request_private(client, None, request)


async def apply_plan(client: Client, plan_id: str = "", *, throttle_bytes: int | None = None) -> PlanResponse:
    """Make the cluster carry out a plan; return when that has begun."""
    return await request_private(client, None, ApplyPlanRequest(plan_id=plan_id, throttle_bytes=throttle_bytes))


async def cancel_plan(client: Client, plan_id: str = "") -> PlanResponse:
    return await request_private(client, None, CancelPlanRequest(plan_id=plan_id))


async def current_plan(client: Client) -> PlanResponse:
    """Return the last plan with its progress, and the drained nodes."""
    return await request_private(client, None, DescribePlanRequest())


async def copied_bytes(client: Client, current: PlanResponse) -> int:
    """Return how much of the moves under way their receivers have fetched, as far as these respond."""
    moving = [planned.move for planned in current.moves if planned.state == "moving"]
    disks = await _disks(client, {node for move in moving for node in move.receivers})
    return sum(
        min(disks[node].sizes.get((move.topic, move.index), 0), move.size_bytes)
        for move in moving
        for node in move.receivers
        if node in disks
    )


async def undrain(client: Client, node: int) -> None:
    """Allow leaders and replicas on a drained node again."""
    await request_private(client, None, UndrainRequest(node=node))


def describe_plan(plan: Plan, *, plan_id: str | None, throttle_bytes: int) -> dict[str, Any]:
    return {
        "plan": plan_id,
        "kind": plan.kind,
        "subject": plan.subject,
        "moves": [
            {
                "topic": move.topic,
                "partition": move.index,
                "from": list(move.before),
                "to": list(move.target),
                "bytes": move.moved_bytes,
            }
            for move in plan.moves
        ],
        "bytes": plan.moved_bytes,
        "throttle_bytes_per_s": throttle_bytes,
        "seconds": round(plan.seconds(throttle_bytes), 1),
        "staying": list(plan.staying),
        "risks": list(plan.risks),
    }


def describe_progress(current: PlanResponse, copied: int = 0) -> dict[str, Any]:
    """Return the last plan of a cluster and its progress as a document, including the bytes copied by current moves."""
    states = Counter(move.state for move in current.moves)
    sizes: Counter[str] = Counter()
    for move in current.moves:
        sizes[move.state] += move.move.moved_bytes
    return {
        "plan": current.plan_id or None,
        "kind": current.kind or None,
        "subject": current.subject,
        "state": current.state or None,
        "throttle_bytes_per_s": current.throttle_bytes,
        "moves": len(current.moves),
        "moved": states["moved"],
        "moving": states["moving"],
        "waiting": states["waiting"],
        "superseded": states["superseded"],
        "bytes": sum(sizes.values()),
        "moved_bytes": sizes["moved"] + copied,
        "partitions_moving": [
            {"topic": move.topic, "partition": move.index, "from": list(move.before), "to": list(move.target)}
            for move in (planned.move for planned in current.moves if planned.state == "moving")
        ],
        "created_ms": current.created_ms,
        "finished_ms": current.finished_ms or None,
        "drained": list(current.drained),
    }
