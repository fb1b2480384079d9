"""What is measured before a plan is computed, while a node is away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from millstream.client.admin import cluster_plans
from millstream.core.ids import NodeId
from millstream.protocol.private.plan_messages import PlanResponse


async def test_a_node_that_is_away_keeps_its_machine_and_its_rack(monkeypatch: pytest.MonkeyPatch) -> None:
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
    found = {node: (load.is_live, load.machine, load.rack) for node, load in nodes.items()}
    assert found == {here: (True, None, "a"), away: (False, away, "b")}
