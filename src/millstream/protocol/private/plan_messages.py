"""Private requests about plans of a cluster and drained nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from millstream.core.cluster_plan import THROTTLE_BYTES, Move
from millstream.core.ids import NodeId
from millstream.protocol.private.message import Request, Response


class PlannedMove(msgspec.Struct, frozen=True):
    """A move of one partition, and its state."""

    move: Move
    state: str = ""


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
    moves: Sequence[Move]
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
