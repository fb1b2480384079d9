"""Private requests about plans of a cluster and drained nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from millstream.broker.cluster.plans import PlanHeader, Plans
from millstream.broker.kafka.api import PrivateApi, RequestT, ResponseT
from millstream.broker.security.audit import Activity, Change
from millstream.broker.security.changes import CREATE, UPDATE, Changes, Users
from millstream.core.acl import Operation
from millstream.core.errors import InvalidRequest
from millstream.core.ids import NodeId
from millstream.protocol.private.message import Response
from millstream.protocol.private.plan_messages import (
    ApplyPlanRequest,
    CancelPlanRequest,
    DescribePlanRequest,
    PlannedMove,
    PlanResponse,
    ProposePlanRequest,
    UndrainRequest,
)


def _plan_changed(activity: Activity) -> Changes:
    def changes(_request: Any, response: PlanResponse, _users: Users) -> Iterator[Change]:
        if response.error == 0:
            data = {"kind": response.kind, "subject": response.subject, "state": response.state}
            yield Change(activity=activity, kind="plan", name=response.plan_id, data=data)

    return changes


class _PlanApi(PrivateApi[RequestT, ResponseT]):
    cluster_operation = Operation.ALTER

    def __init__(self, plans: Plans | None) -> None:
        self._plans = plans

    @property
    def plans(self) -> Plans:
        """The plans of the cluster, or raise `InvalidRequest` on a node without one."""
        if self._plans is None:
            raise InvalidRequest("this node is not part of a cluster: there are no other nodes to move partitions to")
        return self._plans


class PlanPropose(_PlanApi[ProposePlanRequest, PlanResponse]):
    """Stores a plan for review.

    It replaces the last plan, which must have ended. If a partition was moved since, the plan gets INVALID_REQUEST.
    """

    changes = _plan_changed(CREATE)

    async def handle(self, request: ProposePlanRequest) -> PlanResponse:
        header = await self.plans.propose(request.kind, request.subject, request.moves, request.throttle_bytes)
        return _build_response(header)


class PlanApply(_PlanApi[ApplyPlanRequest, PlanResponse]):
    """Applies a plan, or changes the throttle of a running one."""

    changes = _plan_changed(UPDATE)

    async def handle(self, request: ApplyPlanRequest) -> PlanResponse:
        return _build_response(await self.plans.apply(request.plan_id, request.throttle_bytes))


class PlanCancel(_PlanApi[CancelPlanRequest, PlanResponse]):
    """Stops a plan: moves under way go back, completed ones stay."""

    changes = _plan_changed(UPDATE)

    async def handle(self, request: CancelPlanRequest) -> PlanResponse:
        return _build_response(await self.plans.cancel(request.plan_id))


class PlanDescribe(_PlanApi[DescribePlanRequest, PlanResponse]):
    """Returns the last plan, the state of each move, the drained nodes, and the machines and racks of nodes."""

    changes = None
    cluster_operation = Operation.DESCRIBE

    async def handle(self, request: DescribePlanRequest) -> PlanResponse:
        plans = self.plans
        header = plans.current
        return msgspec.structs.replace(
            PlanResponse() if header is None else _build_response(header),
            moves=[PlannedMove(move, state) for move, state in plans.moves()],
            drained=sorted(plans.drained),
            machines=plans.machines,
            racks=plans.racks,
        )


class NodeUndrain(_PlanApi[UndrainRequest, Response]):
    """Undrains a node, so that it may get leaders and replicas again."""

    async def handle(self, request: UndrainRequest) -> Response:
        await self.plans.undrain(NodeId(request.node))
        return Response()

    @staticmethod
    def changes(request: UndrainRequest, response: Response, _users: Users) -> Iterator[Change]:
        if response.error == 0:
            yield Change(activity=UPDATE, kind="node", name=str(request.node), data={"drained": False})


def _build_response(header: PlanHeader) -> PlanResponse:
    return PlanResponse(
        plan_id=header.plan_id,
        kind=header.kind,
        subject=header.subject,
        state=header.state,
        throttle_bytes=header.throttle_bytes,
        created_ms=header.created_ms,
        finished_ms=header.finished_ms,
    )
