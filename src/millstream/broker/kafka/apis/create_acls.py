"""CreateAcls (key 30), versions 1 to 3: answered with SECURITY_DISABLED, since there is no authorization.

Version notes: 2 is flexible.
"""

from __future__ import annotations

from kio.schema.create_acls.v3.request import CreateAclsRequest
from kio.schema.create_acls.v3.response import AclCreationResult, CreateAclsResponse
from kio.schema.errors import ErrorCode

from millstream.broker.kafka.api import NO_THROTTLE, SECURITY_DISABLED, Api, ClientInfo


class CreateAcls(Api[CreateAclsRequest, CreateAclsResponse]):
    """Refuses every access rule: one that is not enforced would be worse than none."""

    key = 30
    versions = (1, 3)

    async def handle(self, request: CreateAclsRequest, client: ClientInfo) -> CreateAclsResponse:
        """Refuse each of them."""
        refused = AclCreationResult(error_code=ErrorCode.security_disabled, error_message=SECURITY_DISABLED)
        return CreateAclsResponse(throttle_time=NO_THROTTLE, results=(refused,) * len(request.creations))
