"""Private requests about plans of a cluster and drained nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar
from uuid import UUID

import msgspec

from millstream.core.cluster_plan import THROTTLE_BYTES, Move
from millstream.core.ids import NodeId, PartitionIndex
from millstream.protocol.private.message import Request, Response


class PlannedMove(msgspec.Struct, frozen=True, kw_only=True):
    """A move of one partition, and in responses what became of it."""

    topic: str
    topic_id: UUID
    partition: int
    before: Sequence[int]
    target: Sequence[int]
    size_bytes: int
    state: str = ""

    @classmethod
    def of(cls, move: Move, state: str = "") -> PlannedMove:
        return cls(
            topic=move.topic,
            topic_id=move.topic_id,
            partition=move.index,
            before=move.before,
            target=move.target,
            size_bytes=move.size_bytes,
            state=state,
        )

    def move(self) -> Move:
        """Convert it back."""
        return Move(
            topic=self.topic,
            topic_id=self.topic_id,
            index=PartitionIndex(self.partition),
            before=tuple(map(NodeId, self.before)),
            target=tuple(map(NodeId, self.target)),
            size_bytes=self.size_bytes,
        )


class PlanResponse(Response, frozen=True, kw_only=True):
    """The last plan; `plan_id` is empty if there is none."""

    plan_id: str = ""
    kind: str = ""
    subject: str = ""
    state: str = ""
    throttle_bytes: int = 0
    created_ms: int = 0
    finished_ms: int = 0
    moves: Sequence[PlannedMove] = ()
    drained: Sequence[int] = ()
    """Nodes that get no new leaders and replicas."""
    machines: Mapping[NodeId, NodeId] = {}
    """The machine of each node that shares it with others, by the first of its nodes, also while it is away."""
    racks: Mapping[NodeId, str] = {}
    """The rack of each node that has one, also while it is away."""


class ProposePlanRequest(Request[PlanResponse], frozen=True, kw_only=True):
    """A plan to store for review."""

    KEY: ClassVar = 32100
    kind: str
    subject: str
    moves: Sequence[PlannedMove]
    throttle_bytes: int = THROTTLE_BYTES


class ApplyPlanRequest(Request[PlanResponse], frozen=True, kw_only=True):
    """A plan to carry out; without an id the last one."""

    KEY: ClassVar = 32101
    plan_id: str = ""
    throttle_bytes: int | None = None
    """Another speed than the plan has, in bytes per second for each receiving node."""


class CancelPlanRequest(Request[PlanResponse], frozen=True, kw_only=True):
    """A plan to stop; without an id the last one."""

    KEY: ClassVar = 32102
    plan_id: str = ""


class DescribePlanRequest(Request[PlanResponse], frozen=True):
    KEY: ClassVar = 32103


class UndrainRequest(Request[Response], frozen=True, kw_only=True):
    """A node that may get leaders and replicas again."""

    KEY: ClassVar = 32104
    node: int
