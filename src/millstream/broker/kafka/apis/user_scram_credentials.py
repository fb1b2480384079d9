"""The APIs of users with passwords."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from kio.schema.alter_user_scram_credentials.v0.request import (
    AlterUserScramCredentialsRequest,
    ScramCredentialUpsertion,
)
from kio.schema.alter_user_scram_credentials.v0.response import (
    AlterUserScramCredentialsResponse,
    AlterUserScramCredentialsResult,
)
from kio.schema.describe_user_scram_credentials.v0.request import DescribeUserScramCredentialsRequest
from kio.schema.describe_user_scram_credentials.v0.response import (
    CredentialInfo,
    DescribeUserScramCredentialsResponse,
    DescribeUserScramCredentialsResult,
)
from kio.schema.errors import ErrorCode
from kio.static.primitive import i8, i32

from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code, error_message
from millstream.broker.security.audit import Change
from millstream.broker.security.changes import CREATE, DELETE, UPDATE, Users, carried_out, change_of
from millstream.broker.security.state import SecurityState
from millstream.core.credential import SCRAM_MECHANISMS, ScramCredential, derive
from millstream.core.errors import InvalidRequest, MillstreamError

_MECHANISMS: Final = dict(enumerate(SCRAM_MECHANISMS, start=1))
Refusal = tuple[ErrorCode, str | None]
_DONE: Final[Refusal] = (ErrorCode.none, None)


class DescribeUserScramCredentials(Api[DescribeUserScramCredentialsRequest, DescribeUserScramCredentialsResponse]):
    """DescribeUserScramCredentials (key 50), version 0: lists users with passwords, and their mechanisms.

    No list of users means all users. Secrets are never returned.
    """

    key = 50
    versions = (0, 0)
    changes = None

    def __init__(self, security: SecurityState) -> None:
        self._security = security

    async def handle(
        self, request: DescribeUserScramCredentialsRequest, client: ClientInfo
    ) -> DescribeUserScramCredentialsResponse:
        if request.users:
            counts = Counter(user.name for user in request.users)
        else:
            counts = Counter({user: 1 for user, _ in self._security.credentials})
        return DescribeUserScramCredentialsResponse(
            throttle_time=NO_THROTTLE,
            error_code=ErrorCode.none,
            error_message=None,
            results=tuple(self._describe(user, times) for user, times in sorted(counts.items())),
        )

    def _describe(self, user: str, times: int) -> DescribeUserScramCredentialsResult:
        infos = tuple(
            CredentialInfo(mechanism=i8(number), iterations=i32(credential.iterations))
            for number, mechanism in _MECHANISMS.items()
            if (credential := self._security.credentials.get((user, mechanism))) is not None
        )
        code, message = ErrorCode.none, None
        if times > 1:
            code, message, infos = (
                ErrorCode.duplicate_resource,
                f"user {user!r} is named more than once in the request",
                (),
            )
        elif not infos:
            code, message = ErrorCode.resource_not_found, f"user {user!r} has no password"
        return DescribeUserScramCredentialsResult(
            user=user, error_code=code, error_message=message, credential_infos=infos
        )


class AlterUserScramCredentials(Api[AlterUserScramCredentialsRequest, AlterUserScramCredentialsResponse]):
    """AlterUserScramCredentials (key 51), version 0: creates users, changes their passwords, deletes them.

    The client sends the salted password, never the password itself. Each user succeeds or fails independently; a user
    that is named twice for one mechanism fails. Connections that were opened with a deleted password are closed.
    """

    key = 51
    versions = (0, 0)

    def __init__(self, security: SecurityState) -> None:
        self._security = security

    async def handle(
        self, request: AlterUserScramCredentialsRequest, client: ClientInfo
    ) -> AlterUserScramCredentialsResponse:
        named = [(deletion.name, int(deletion.mechanism)) for deletion in request.deletions]
        named += [(upsertion.name, int(upsertion.mechanism)) for upsertion in request.upsertions]
        results: dict[str, Refusal] = {}
        for (user, _), times in Counter(named).items():
            twice = ErrorCode.duplicate_resource, f"user {user!r} is named twice for one mechanism"
            results[user] = twice if times > 1 else results.get(user, _DONE)
        puts: list[ScramCredential] = []
        for upsertion in request.upsertions:
            if results[upsertion.name] == _DONE:
                results[upsertion.name] = self._parse_upsertion(upsertion, puts)
        deletes: list[tuple[str, str]] = []
        for deletion in request.deletions:
            key = (deletion.name, _MECHANISMS.get(deletion.mechanism, ""))
            if results[deletion.name] == _DONE:
                results[deletion.name] = _DONE if key in self._security.credentials else _unknown_user(deletion.name)
                deletes.append(key)
        failed = {user for user, result in results.items() if result != _DONE}
        await self._security.change_users(
            [put for put in puts if put.user not in failed], [delete for delete in deletes if delete[0] not in failed]
        )
        return _response(results)

    def failure(
        self, error: MillstreamError, request: AlterUserScramCredentialsRequest
    ) -> AlterUserScramCredentialsResponse:
        users = {deletion.name for deletion in request.deletions} | {upsertion.name for upsertion in request.upsertions}
        return _response(dict.fromkeys(users, (error_code(error), error_message(error))))

    def _parse_upsertion(self, upsertion: ScramCredentialUpsertion, puts: list[ScramCredential]) -> Refusal:
        mechanism = _MECHANISMS.get(upsertion.mechanism)
        if mechanism is None:
            return ErrorCode.unsupported_sasl_mechanism, f"mechanism {upsertion.mechanism} is not known"
        credential = derive(
            upsertion.name,
            mechanism,
            upsertion.salted_password,
            salt=upsertion.salt,
            iterations=upsertion.iterations,
        )
        try:
            credential.check()
        except InvalidRequest as error:
            return ErrorCode.unacceptable_credential, str(error)
        puts.append(credential)
        return _DONE

    @staticmethod
    def changes(
        request: AlterUserScramCredentialsRequest, response: AlterUserScramCredentialsResponse, users: Users
    ) -> Iterator[Change]:
        known = {user for user, _mechanism in users}
        put = {upsertion.name for upsertion in request.upsertions}
        for result in carried_out(response.results):
            if result.user in put:
                activity = UPDATE if result.user in known else CREATE
            else:
                deleted_mechanisms = {
                    deletion.mechanism for deletion in request.deletions if deletion.name == result.user
                }
                held = sum(user == result.user for user, _mechanism in users)
                activity = DELETE if len(deleted_mechanisms) >= held else UPDATE
            yield change_of(result, activity, "user", result.user)


def _unknown_user(user: str) -> Refusal:
    return ErrorCode.resource_not_found, f"user {user!r} has no password for this mechanism"


def _response(results: dict[str, Refusal]) -> AlterUserScramCredentialsResponse:
    return AlterUserScramCredentialsResponse(
        throttle_time=NO_THROTTLE,
        results=tuple(
            AlterUserScramCredentialsResult(user=user, error_code=code, error_message=message)
            for user, (code, message) in results.items()
        ),
    )
