"""DescribeAcls (key 29), versions 1 to 3: answered with SECURITY_DISABLED, since there is no authorization.

This is what a Kafka without an authorizer answers, and what tools ask to find out whether there are access rules.

Version notes: 2 is flexible.
"""

from __future__ import annotations

from kio.schema.describe_acls.v3.request import DescribeAclsRequest
from kio.schema.describe_acls.v3.response import DescribeAclsResponse
from kio.schema.errors import ErrorCode

from millstream.broker.kafka.api import NO_THROTTLE, SECURITY_DISABLED, Api, ClientInfo


class DescribeAcls(Api[DescribeAclsRequest, DescribeAclsResponse]):
    """Reports that there are no access rules."""

    key = 29
    versions = (1, 3)

    async def handle(self, request: DescribeAclsRequest, client: ClientInfo) -> DescribeAclsResponse:
        """Return SECURITY_DISABLED."""
        return DescribeAclsResponse(
            throttle_time=NO_THROTTLE,
            error_code=ErrorCode.security_disabled,
            error_message=SECURITY_DISABLED,
            resources=(),
        )
