"""Authenticate: how a gateway verifies its callers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from millstream.broker.kafka.apis.security_apis import Authenticate
from millstream.broker.security.gate import AuthenticationContext
from millstream.broker.security.state import SecurityState
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import CatalogUnavailable, InvalidRequest
from millstream.protocol.private.security_messages import AuthenticateRequest
from millstream_testing.security import authenticating

HOST, PASSWORD = "10.0.0.7", "alice-password"


@pytest.fixture
async def authentication(tmp_path: Path) -> AsyncIterator[AuthenticationContext]:
    async with authenticating(tmp_path, "alice", PASSWORD) as context:
        yield context


async def test_a_caller_is_asserted_with_its_address(authentication: AuthenticationContext) -> None:
    api = Authenticate(authentication, requires=True)
    request = AuthenticateRequest(scheme="basic", host=HOST, user="alice", secret=PASSWORD)
    response = await api.handle(request)
    assert (response.error, response.principal) == (0, "User:alice")
    asserted = await authentication.assertions.verify(response.assertion.encode())
    assert (asserted.principal, asserted.host) == ("User:alice", HOST)
    assert await api.needs(request) == [(Operation.CLUSTER_ACTION, ResourceType.CLUSTER, "kafka-cluster")]
    assert PASSWORD not in repr(request)


@pytest.mark.parametrize(
    "request_",
    [
        AuthenticateRequest(scheme="basic", host=HOST, user="alice", secret="wrong"),
        AuthenticateRequest(scheme="basic", host=HOST, user="nobody", secret=PASSWORD),
        AuthenticateRequest(scheme="basic", host=HOST, user="", secret=PASSWORD),
        AuthenticateRequest(scheme="basic", host=HOST, user="x" * 10_000, secret="x" * 100_000),
        AuthenticateRequest(scheme="bearer", host=HOST, secret="a.b.c"),
        AuthenticateRequest(scheme="", host=HOST),
        AuthenticateRequest(scheme="digest", host=HOST, user="alice", secret=PASSWORD),
    ],
)
async def test_a_failure_carries_no_assertion_and_takes_longer_each_time(
    authentication: AuthenticationContext, request_: AuthenticateRequest
) -> None:
    api = Authenticate(authentication, requires=True)
    pauses = []
    for _ in range(3):
        response = await api.handle(request_)
        assert (response.error, response.assertion, response.principal) == (58, "", "")
        pauses.append(response.pause_ms)
    assert pauses == sorted(set(pauses))
    assert pauses[0] > 0


async def test_a_caller_without_a_credential_is_anonymous_where_allowed(authentication: AuthenticationContext) -> None:
    response = await Authenticate(authentication, requires=False).handle(AuthenticateRequest(scheme="", host=HOST))
    assert (await authentication.assertions.verify(response.assertion.encode())).principal == "User:ANONYMOUS"


async def test_a_node_without_authentication_reports_so() -> None:
    with pytest.raises(InvalidRequest, match="--auth required"):
        await Authenticate(None, requires=False).handle(AuthenticateRequest(scheme="", host=HOST))


async def test_a_node_that_does_not_know_its_users_refuses_no_password(authentication: AuthenticationContext) -> None:
    authentication = replace(authentication, state=SecurityState(authentication.state._declarations, ()))
    request = AuthenticateRequest(scheme="basic", host=HOST, user="alice", secret=PASSWORD)
    with pytest.raises(CatalogUnavailable, match="not known yet"):
        await Authenticate(authentication, requires=True).handle(request)
