"""The callers of the gateway: caching, sharing, limits and eviction, against a scripted node."""

from __future__ import annotations

import asyncio
import base64
import time
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import Any, cast

import pytest

from millstream.core.errors import BrokerUnreachable
from millstream.gateway import callers as callers_module
from millstream.gateway.api.problem import Refused
from millstream.gateway.api.services import Services
from millstream.gateway.callers import PENDING_PER_HOST_MAX, Callers
from millstream.protocol.private.message import decode, encode
from millstream.protocol.private.security_messages import AuthenticateRequest, AuthenticateResponse
from millstream_testing.waiting import until

HOST = "10.0.0.7"


class Node:
    """A stand-in for the services of the gateway, and for the node behind them."""

    def __init__(self) -> None:
        self.client = self
        self.asked: list[AuthenticateRequest] = []
        self.responses: dict[str, AuthenticateResponse | Exception] = {}
        self.may_respond = asyncio.Event()
        self.may_respond.set()
        self.closed = 0
        self.credentials: list[Any] = []

    async def private(self, node: None, key: int, body: bytes, *, waits: bool) -> bytes:
        request = decode(body, AuthenticateRequest)
        self.asked.append(request)
        await self.may_respond.wait()
        response = self.responses.get(request.user) or AuthenticateResponse(
            principal=f"User:{request.user}", identity=request.user, assertion=f"assertion {len(self.asked)}"
        )
        if isinstance(response, Exception):
            raise response
        return encode(response)

    def acting_for(self, principal: str, credentials: Any) -> Node:
        self.credentials.append(credentials)
        return self

    async def close(self) -> None:
        self.closed += 1


@pytest.fixture
async def node() -> Node:
    return Node()


def made(node: Node, *, requires: bool = True) -> Callers:
    return Callers(cast("Services", node), requires=requires)


def basic(user: str, password: str = "secret") -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Basic " + base64.b64encode(f"{user}:{password}".encode()))]


async def principal(callers: Callers, headers: list[tuple[bytes, bytes]], host: str = HOST) -> str:
    async with callers.acting_for(headers, host) as caller:
        return caller.principal


async def test_a_verified_credential_is_cached_for_a_while(node: Node) -> None:
    callers = made(node)
    for _ in range(3):
        assert await principal(callers, basic("alice")) == "User:alice"
    assert len(node.asked) == 1
    await principal(callers, basic("alice", "another"))
    await principal(callers, basic("alice"), "10.0.0.8")
    assert [request.host for request in node.asked] == [HOST, HOST, "10.0.0.8"]
    await callers.close()


async def test_concurrent_requests_with_the_same_credential_share_a_verification(node: Node) -> None:
    callers = made(node)
    node.may_respond.clear()
    asking = [asyncio.ensure_future(principal(callers, basic("alice"))) for _ in range(100)]
    await asyncio.sleep(0)
    asking[0].cancel()
    node.may_respond.set()
    assert await asyncio.gather(*asking[1:]) == ["User:alice"] * 99
    assert len(node.asked) == 1
    await callers.close()


async def test_the_cache_does_not_contain_the_credential(node: Node) -> None:
    callers = made(node)
    await principal(callers, basic("alice", "a very secret password"))
    assert "secret password" not in repr(vars(callers))
    assert "secret password" not in repr(node.asked)
    await callers.close()


async def test_equal_callers_share_connections_opened_with_the_last_assertion(node: Node) -> None:
    callers = made(node)
    for password in ("first token", "second token"):
        await principal(callers, basic("alice", password))
    (credentials,) = node.credentials
    begun = credentials.begin()
    assert begun is not None
    mechanism, exchange = begun
    assert mechanism == "MILLSTREAM-ASSERTION"
    assert next(exchange) == b"assertion 2"
    assert credentials.tls_context is None
    await callers.close()
    assert node.closed == 1


async def test_an_expired_credential_is_verified_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    callers = made(node)
    node.responses["alice"] = AuthenticateResponse(
        principal="User:alice", identity="alice", assertion="x", expires_ms=int(time.time() * 1000) - 1
    )
    for _ in range(2):
        await principal(callers, basic("alice"))
    assert len(node.asked) == 2
    await callers.close()


async def test_a_failure_is_reported_after_the_pause_and_not_cached(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers, pauses = made(node), []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("millstream.gateway.callers.asyncio.sleep", sleep)
    node.responses["eve"] = AuthenticateResponse(error=58, message="wrong", pause_ms=800)
    for _ in range(2):
        with pytest.raises(Refused) as refused:
            await principal(callers, basic("eve"))
        assert refused.value.status is HTTPStatus.UNAUTHORIZED
        assert refused.value.headers["www-authenticate"].startswith("Basic realm=")
    assert pauses == [0.8, 0.8]
    assert not callers._pending
    await callers.close()


@pytest.mark.parametrize(
    ("first", "second", "other"),
    [("10.0.0.7", "10.0.0.7", "10.0.0.8"), ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1")],
)
async def test_concurrent_verifications_per_address_are_limited(
    node: Node, first: str, second: str, other: str
) -> None:
    callers = made(node)
    node.may_respond.clear()
    asking = [
        asyncio.ensure_future(principal(callers, basic(f"user-{number}"), first))
        for number in range(PENDING_PER_HOST_MAX)
    ]
    await asyncio.sleep(0)
    with pytest.raises(Refused) as refused:
        await principal(callers, basic("one-more"), second)
    assert refused.value.status is HTTPStatus.TOO_MANY_REQUESTS
    elsewhere = asyncio.ensure_future(principal(callers, basic("one-more"), other))
    node.may_respond.set()
    await asyncio.gather(*asking, elsewhere)
    assert await principal(callers, basic("one-more"), first) == "User:one-more"
    await callers.close()


async def test_idle_callers_are_evicted_and_busy_ones_are_not(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers_module, "CALLERS_MAX", 2)
    callers = made(node)
    async with callers.acting_for(basic("alice"), HOST):
        await principal(callers, basic("bob"))
        await principal(callers, basic("carol"))
        assert node.closed == 1, "bob was idle"
        async with callers.acting_for(basic("carol"), HOST):
            with pytest.raises(Refused) as refused:
                await principal(callers, basic("dave"))
            assert refused.value.status is HTTPStatus.SERVICE_UNAVAILABLE
    assert await principal(callers, basic("bob")) == "User:bob"
    await callers.close()


async def test_the_callers_of_one_principal_leave_room_for_others(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers_module, "CALLERS_MAX", 4)
    callers = made(node)
    async with AsyncExitStack() as busy:
        for host in ("10.0.0.1", "10.0.0.2", "10.0.0.3"):
            await busy.enter_async_context(callers.acting_for(basic("alice"), host))
        with pytest.raises(Refused, match="3 other callers"):
            await principal(callers, basic("alice"), "10.0.0.4")
        assert await principal(callers, basic("bob")) == "User:bob"
    await callers.close()


async def test_connections_of_an_idle_caller_are_closed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers_module, "IDLE_S", 0.05)
    callers = made(node)
    await principal(callers, basic("alice"))
    await until(lambda: node.closed)
    assert await principal(callers, basic("alice")) == "User:alice"
    assert len(node.asked) == 2
    await callers.close()


async def test_a_stream_ends_when_its_caller_is_no_longer_valid(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers_module, "RENEW_S", 0.0)
    callers = made(node)
    lapsed = asyncio.ensure_future(callers.until_lapsed(callers.read(basic("alice"), HOST)))
    async with asyncio.timeout(30):
        await until(lambda: len(node.asked) >= 3)
        assert not lapsed.done()
        node.responses["alice"] = AuthenticateResponse(error=58, message="the user was deleted")
        assert (await lapsed).detail == "the user was deleted"
    await callers.close()


async def test_a_caller_without_a_credential_is_anonymous_where_allowed(node: Node) -> None:
    callers = made(node, requires=False)
    async with callers.acting_for([], HOST):
        assert node.asked == [AuthenticateRequest(scheme="", host=HOST)]
    await callers.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], HTTPStatus.UNAUTHORIZED),
        ([*basic("alice"), *basic("bob")], HTTPStatus.BAD_REQUEST),
        ([(b"authorization", b"Basic " + b"x" * 100_000)], HTTPStatus.UNAUTHORIZED),
        ([(b"authorization", b"Negotiate x")], HTTPStatus.UNAUTHORIZED),
    ],
)
async def test_a_malformed_credential_never_reaches_the_node(
    node: Node, headers: list[tuple[bytes, bytes]], status: HTTPStatus
) -> None:
    callers = made(node)
    with pytest.raises(Refused) as refused:
        await principal(callers, headers)
    assert refused.value.status is status
    assert node.asked == []
    await callers.close()


async def test_an_unavailable_node_is_not_cached_as_a_refusal(node: Node) -> None:
    callers = made(node)
    node.responses["alice"] = BrokerUnreachable("away")
    with pytest.raises(BrokerUnreachable):
        await principal(callers, basic("alice"))
    del node.responses["alice"]
    assert await principal(callers, basic("alice")) == "User:alice"
    await callers.close()


async def test_a_refused_assertion_is_replaced_while_a_request_needs_it(node: Node) -> None:
    callers = made(node)
    node.responses["alice"] = AuthenticateResponse(principal="User:alice", identity="alice 1", assertion="old")
    async with callers.acting_for(basic("alice"), HOST) as caller:
        # The user is deleted and created again.
        node.responses["alice"] = AuthenticateResponse(principal="User:alice", identity="alice 2", assertion="new")
        (credentials,) = node.credentials
        await credentials.renew()
        assert caller.assertion == "new"
        node.responses["alice"] = AuthenticateResponse(error=58, message="wrong")
        await credentials.renew()
        assert caller.assertion == "new", "the next connection is refused with it, and its caller asked again"
    assert caller.shown is None, "credentials are not kept beyond a request"
    await callers.close()
