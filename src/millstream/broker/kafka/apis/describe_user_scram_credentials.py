"""DescribeUserScramCredentials (key 50), version 0: lists users with passwords, and their mechanisms.

No list of users means all users. Secrets are never returned.
"""

from __future__ import annotations

from collections import Counter

from kio.schema.describe_user_scram_credentials.v0.request import DescribeUserScramCredentialsRequest
from kio.schema.describe_user_scram_credentials.v0.response import (
    CredentialInfo,
    DescribeUserScramCredentialsResponse,
    DescribeUserScramCredentialsResult,
)
from kio.schema.errors import ErrorCode
from kio.static.primitive import i8, i32

from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo
from millstream.broker.security.state import SecurityState
from millstream.core.credential import SCRAM_MECHANISMS


class DescribeUserScramCredentials(Api[DescribeUserScramCredentialsRequest, DescribeUserScramCredentialsResponse]):
    key = 50
    versions = (0, 0)
    changes = None

    def __init__(self, security: SecurityState) -> None:
        self._security = security

    async def handle(
        self, request: DescribeUserScramCredentialsRequest, client: ClientInfo
    ) -> DescribeUserScramCredentialsResponse:
        if request.users:
            asked = Counter(user.name for user in request.users)
        else:
            asked = Counter({user: 1 for user, _ in self._security.credentials})
        return _response(tuple(self._describe(user, times) for user, times in sorted(asked.items())))

    def _describe(self, user: str, times: int) -> DescribeUserScramCredentialsResult:
        found = tuple(
            CredentialInfo(mechanism=i8(number), iterations=i32(credential.iterations))
            for number, mechanism in enumerate(SCRAM_MECHANISMS, start=1)
            if (credential := self._security.credentials.get((user, mechanism))) is not None
        )
        code, message = ErrorCode.none, None
        if times > 1:
            code, message, found = ErrorCode.duplicate_resource, f"user {user!r} is asked for more than once", ()
        elif not found:
            code, message = ErrorCode.resource_not_found, f"user {user!r} has no password"
        return DescribeUserScramCredentialsResult(
            user=user, error_code=code, error_message=message, credential_infos=found
        )


def _response(results: tuple[DescribeUserScramCredentialsResult, ...]) -> DescribeUserScramCredentialsResponse:
    return DescribeUserScramCredentialsResponse(
        throttle_time=NO_THROTTLE, error_code=ErrorCode.none, error_message=None, results=results
    )
