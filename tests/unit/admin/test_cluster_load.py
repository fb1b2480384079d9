"""Load measurement before a plan is computed, while a node is down, and while the plan runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from millstream.client.admin import cluster_plans
from millstream.core.cluster_plan import Move
from millstream.core.ids import NodeId, PartitionIndex
from millstream.protocol.private.plan_messages import PlannedMove, PlanResponse


async def test_an_unavailable_node_keeps_its_machine_and_rack(monkeypatch: pytest.MonkeyPatch) -> None:
    here, away = NodeId(1), NodeId(2)
    partition = SimpleNamespace(partition=0, leader_id=here, replicas=(here, away), in_sync=(here,))
    topic = SimpleNamespace(name="orders", topic_id=UUID(int=1), partitions={0: partition})

    async def metadata() -> Any:
        return SimpleNamespace(nodes={here: SimpleNamespace(rack="a")}, topics={"orders": topic})

    async def plan(_client: object) -> PlanResponse:
        return PlanResponse(machines={away: away}, racks={here: "a before", away: "b"})

    async def disks(*_asked: object) -> dict[NodeId, Any]:
        return {}

    monkeypatch.setattr(cluster_plans, "current_plan", plan)
    monkeypatch.setattr(cluster_plans, "_disks", disks)
    client: Any = SimpleNamespace(metadata=metadata)
    nodes = (await cluster_plans.measure_load(client, interval_s=0)).nodes
    states = {node: (load.is_live, load.machine, load.rack) for node, load in nodes.items()}
    assert states == {here: (True, None, "a"), away: (False, away, "b")}


async def test_progress_includes_bytes_copied_by_unfinished_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    def move(partition: int, state: str) -> PlannedMove:
        moved = Move(
            topic="orders",
            topic_id=UUID(int=1),
            index=PartitionIndex(partition),
            before=(NodeId(1),),
            target=(NodeId(1), NodeId(2), NodeId(3)),
            size_bytes=100,
        )
        return PlannedMove(moved, state)

    async def disk(_client: object, node: NodeId) -> Any:
        # The third node does not respond; the second holds more of one partition than when the plan was made.
        sizes = {("orders", 0): 100, ("orders", 1): 30, ("orders", 2): 120, ("orders", 3): 9}
        return None if node == 3 else SimpleNamespace(sizes=sizes)

    monkeypatch.setattr(cluster_plans, "_disk", disk)
    current = PlanResponse(moves=[move(0, "moved"), move(1, "moving"), move(2, "moving"), move(3, "waiting")])
    client: Any = None
    copied = await cluster_plans.copied_bytes(client, current)
    assert copied == 130
    progress = cluster_plans.describe_progress(current, copied)
    assert (progress["moved_bytes"], progress["bytes"]) == (330, 800)
