"""DeleteAcls (key 31), versions 1 to 3: answered with SECURITY_DISABLED, since there is no authorization.

Version notes: 2 is flexible.
"""

from __future__ import annotations

from kio.schema.delete_acls.v3.request import DeleteAclsRequest
from kio.schema.delete_acls.v3.response import DeleteAclsFilterResult, DeleteAclsResponse
from kio.schema.errors import ErrorCode

from millstream.broker.kafka.api import NO_THROTTLE, SECURITY_DISABLED, Api, ClientInfo


class DeleteAcls(Api[DeleteAclsRequest, DeleteAclsResponse]):
    """Says that there are no access rules."""

    key = 31
    versions = (1, 3)

    async def handle(self, request: DeleteAclsRequest, client: ClientInfo) -> DeleteAclsResponse:
        """Say so for each filter."""
        refused = DeleteAclsFilterResult(
            error_code=ErrorCode.security_disabled, error_message=SECURITY_DISABLED, matching_acls=()
        )
        return DeleteAclsResponse(throttle_time=NO_THROTTLE, filter_results=(refused,) * len(request.filters))
