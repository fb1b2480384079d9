"""FindCoordinator (key 10), versions 0 to 6: returns the node that coordinates a group (type 0) or a transactional id
(type 1).

The first request creates the internal topic. A name is coordinated by the leader of its partition of that topic; while
there is none, COORDINATOR_NOT_AVAILABLE lets clients retry. The partition of a transactional id of a batch commit
depends on its query (`broker/transactions/transaction.py`).

Version notes: up to 3 a request has one key, from 4 on several. 1 adds the type of the key; 6 adds the coordinator of
share states (type 2), which only Kafka's brokers use: it gets INVALID_REQUEST.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode
from kio.schema.find_coordinator.v3.response import FindCoordinatorResponse as SingleResponse
from kio.schema.find_coordinator.v6.request import FindCoordinatorRequest
from kio.schema.find_coordinator.v6.response import Coordinator, FindCoordinatorResponse
from kio.schema.types import BrokerId
from kio.static.primitive import i32

from millstream.broker.cluster.membership import Membership
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code, error_message
from millstream.broker.transactions.coordinator import TransactionCoordinator
from millstream.core.errors import MillstreamError
from millstream.protocol.messages.codec import load_response_class
from millstream.protocol.messages.shape import reshape

_GROUP, _TRANSACTION = 0, 1
_FIRST_WITH_MANY: Final = 4

_Coordinators = GroupCoordinator | TransactionCoordinator


class FindCoordinator(Api[FindCoordinatorRequest, FindCoordinatorResponse]):
    key = 10
    versions = (0, 6)
    changes = None

    def __init__(self, groups: GroupCoordinator, transactions: TransactionCoordinator, membership: Membership) -> None:
        self._coordinators: dict[int, _Coordinators] = {_GROUP: groups, _TRANSACTION: transactions}
        self._membership = membership

    async def handle(self, request: FindCoordinatorRequest, client: ClientInfo) -> FindCoordinatorResponse:
        coordinator = self._coordinators.get(request.key_type)
        if coordinator is None:
            return _error_response(
                request, ErrorCode.invalid_request, f"no coordinator for keys of type {request.key_type}"
            )
        await coordinator.ensure()
        coordinators = tuple(self._find(key, coordinator, client) for key in request.coordinator_keys)
        return FindCoordinatorResponse(throttle_time=NO_THROTTLE, coordinators=coordinators)

    def _find(self, key: str, coordinator: _Coordinators, client: ClientInfo) -> Coordinator:
        try:
            leader = coordinator.leader_of(key)
        except MillstreamError as error:
            return _not_found(key, error_code(error), error_message(error))
        node = None if leader is None else self._membership.node(leader)
        address = None if node is None else node.address_for(client.listener, client.reached_at)
        if node is None or address is None:
            return _not_found(key, ErrorCode.coordinator_not_available, f"the partition of {key!r} has no leader")
        return Coordinator(
            key=key,
            node_id=BrokerId(node.node_id),
            host=address[0],
            port=i32(address[1]),
            error_code=ErrorCode.none,
            error_message="",
        )

    def upgrade(self, version: int, request: Any) -> FindCoordinatorRequest:
        """Convert the single key of older versions to a list."""
        upgraded = super().upgrade(version, request)
        if version >= _FIRST_WITH_MANY:
            return upgraded
        return FindCoordinatorRequest(key_type=upgraded.key_type, coordinator_keys=(request.key,))

    def downgrade(self, version: int, response: FindCoordinatorResponse) -> Any:
        """Unwrap the single response for older versions."""
        if version >= _FIRST_WITH_MANY:
            return super().downgrade(version, response)
        only = response.coordinators[0]
        single = SingleResponse(
            throttle_time=response.throttle_time,
            error_code=only.error_code,
            error_message=only.error_message,
            node_id=only.node_id,
            host=only.host,
            port=only.port,
        )
        return reshape(single, load_response_class(self.key, version))

    def failure(self, error: MillstreamError, request: FindCoordinatorRequest) -> FindCoordinatorResponse:
        return _error_response(request, error_code(error), error_message(error))


def _error_response(request: FindCoordinatorRequest, code: ErrorCode, message: str) -> FindCoordinatorResponse:
    refused = tuple(_not_found(key, code, message) for key in request.coordinator_keys)
    return FindCoordinatorResponse(throttle_time=NO_THROTTLE, coordinators=refused)


def _not_found(key: str, code: ErrorCode, message: str) -> Coordinator:
    return Coordinator(key=key, node_id=BrokerId(-1), host="", port=i32(-1), error_code=code, error_message=message)
