"""DescribeCluster (key 60), versions 0 to 2: returns the cluster's id, its nodes and its controller.

Version notes: 1 adds the kind of endpoint; brokers are described, and a request for controllers is refused. 2 adds
fenced nodes.
"""

from __future__ import annotations

from typing import Final

from kio.schema.describe_cluster.v2.request import DescribeClusterRequest
from kio.schema.describe_cluster.v2.response import DescribeClusterBroker, DescribeClusterResponse
from kio.schema.errors import ErrorCode
from kio.schema.types import BrokerId
from kio.static.primitive import i8, i32

from millstream.broker.cluster.membership import Membership
from millstream.broker.kafka.api import NO_THROTTLE, NOT_REQUESTED, Api, ClientInfo, cluster_operations

_BROKERS: Final = i8(1)
_CONTROLLERS: Final = 2


class DescribeCluster(Api[DescribeClusterRequest, DescribeClusterResponse]):
    key = 60
    versions = (0, 2)
    changes = None

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    async def handle(self, request: DescribeClusterRequest, client: ClientInfo) -> DescribeClusterResponse:
        if request.endpoint_type == _CONTROLLERS:
            return _error_response(
                ErrorCode.mismatched_endpoint_type, "controllers were requested; this endpoint serves brokers"
            )
        if request.endpoint_type != _BROKERS:
            return _error_response(
                ErrorCode.unsupported_endpoint_type, f"endpoint type {request.endpoint_type} is unknown"
            )
        with_operations = request.include_cluster_authorized_operations
        return DescribeClusterResponse(
            throttle_time=NO_THROTTLE,
            error_code=ErrorCode.none,
            endpoint_type=_BROKERS,
            cluster_id=self._membership.cluster_id,
            controller_id=BrokerId(self._membership.controller_id),
            brokers=tuple(
                DescribeClusterBroker(
                    broker_id=BrokerId(node.node_id),
                    host=host,
                    port=i32(port),
                    rack=node.rack,
                    is_fenced=False,
                )
                for node, host, port in self._membership.nodes_of(client.listener, client.reached_at)
            ),
            cluster_authorized_operations=cluster_operations(client) if with_operations else NOT_REQUESTED,
        )


def _error_response(code: ErrorCode, message: str) -> DescribeClusterResponse:
    return DescribeClusterResponse(
        throttle_time=NO_THROTTLE,
        error_code=code,
        error_message=message,
        endpoint_type=_BROKERS,
        cluster_id="",
        brokers=(),
    )
