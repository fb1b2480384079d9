"""The decisions of push: signatures, addresses, verdicts, the concurrency of an endpoint, the encoding of messages."""

from __future__ import annotations

import asyncio
import json
import socket
from email.utils import formatdate
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from time import time
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.broker.kafka.setting_view import share_group_settings
from millstream.core.errors import InvalidSetting, PolicyViolation
from millstream.core.ids import Offset
from millstream.core.push import BINARY, RAW, STRUCTURED, check_push, headers_of, keys_of
from millstream.core.setting import HIDDEN
from millstream.core.subscription import Subscription, SubscriptionSettings, without_secrets
from millstream.gateway.push.address import SPECIAL_IPV4, SPECIAL_IPV6, Addresses, is_public
from millstream.gateway.push.endpoint import (
    DOWN_AFTER,
    PAUSE_S_MAX,
    PAUSE_S_MIN,
    Endpoint,
    EndpointResponse,
    Verdict,
    retry_after,
)
from millstream.gateway.push.event import Content, content_of
from millstream.gateway.push.sender import signature
from millstream.protocol.private.subscriptions import LeasedMessage
from millstream.protocol.records.record import Headers, Record

TOPIC_ID = UUID(int=7)


def message(value: bytes | None, headers: Headers = (), key: bytes | None = b"c7") -> LeasedMessage:
    record = Record(Offset(3), 1_700_000_000_123, key, value, headers)
    return LeasedMessage(None, "orders", TOPIC_ID, 2, 4, 0, record)


def lines(content: Content) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in content.headers}


# -- signatures --------------------------------------------------------------------------------------------------


def test_a_signature_follows_standard_webhooks() -> None:
    (key,) = keys_of("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    made = signature([key], b"msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert made == b"v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert len(signature([key, key], b"id", 1, b"").split()) == 2


# -- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "headers", "secret"),
    [
        ("ftp://example.com", "", ""),
        ("https://", "", ""),
        ("https://user:pass@example.com", "", ""),
        ("https://example.com/#part", "", ""),
        ("https://example.com:0/", "", ""),
        ("https://example.com:99999/", "", ""),
        ("https://exämple.com/", "", ""),
        ("https://example.com/a b", "", ""),
        ("https://example.com/" + "x" * 2000, "", ""),
        ("", "no JSON", ""),
        ("", '["a"]', ""),
        ("", '{"a": 1}', ""),
        ("", '{"a b": "x"}', ""),
        ("", '{"Host": "x"}', ""),
        ("", '{"webhook-id": "x"}', ""),
        ("", "[" * 8000, ""),
        ("", '{"a": "x\\r\\nb: y"}', ""),
        ("", "", "tooshort"),
        ("", "", "whsec_%%%%"),
        ("", "", "a" * 20 + " short"),
    ],
)
def test_an_invalid_push_setting_is_refused_without_revealing_a_secret(url: str, headers: str, secret: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        check_push(url, headers, secret)
    assert not secret or secret not in str(refused.value)


def test_secrets_are_redacted() -> None:
    given_settings = {
        "millstream.push.secret": "s" * 20,
        "millstream.push.headers": '{"a": "b"}',
        "millstream.push.url": "",
    }
    assert without_secrets(given_settings) == {
        "millstream.push.secret": HIDDEN,
        "millstream.push.headers": HIDDEN,
        "millstream.push.url": "",
    }
    reported = SubscriptionSettings.from_strings(given_settings).as_strings()
    assert reported["millstream.push.secret"] == HIDDEN
    assert SubscriptionSettings().as_strings()["millstream.push.secret"] == ""
    assert headers_of('{"Authorization": "Bearer x"}') == {"Authorization": "Bearer x"}
    declared = Subscription(name="s", subscription_id=UUID(int=1), topics=(), overrides=given_settings, created_ms=0)
    views = {view.declared.name: view for view in share_group_settings(declared)}
    assert views["millstream.push.secret"].value is None
    assert views["millstream.push.secret"].declared.is_secret
    assert views["millstream.push.format"].value == BINARY


# -- addresses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1%eth0",
        "fd00:ec2::254",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::a00:1",
        "2002:7f00:1::",
        "192.0.0.1",
        "192.0.0.192",
        "168.63.129.16",
        "198.18.0.1",
        "240.0.0.1",
        "::10.0.0.1",
        "::8.8.8.8",
        "::ffff:0:10.0.0.1",
        "64:ff9b:1::a00:1",
        "64:ff9b:1:ffff:ffff:ffff:808:808",
        "fec0::1",
        "2001:0:4136:e378:8000:63bf:f5ff:fffe",
        "2606:4700::5efe:10.0.0.1",
        "2606:4700::200:5efe:169.254.169.254",
        "3fff::1",
        "4000::1",
        "no address",
    ],
)
def test_addresses_that_only_the_node_can_reach_are_private(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


SPECIAL: list[IPv4Network | IPv6Network] = [*SPECIAL_IPV4, *SPECIAL_IPV6]


@given(st.sampled_from(SPECIAL).flatmap(lambda network: st.ip_addresses(network=network)))
def test_no_special_address_is_public_in_any_embedding(address: IPv4Address | IPv6Address) -> None:
    assert not is_public(str(address))
    if isinstance(address, IPv4Address):
        for prefix in ("::ffff:0:0", "64:ff9b::", "64:ff9b:1::", "::", "::ffff:0:0:0", "2606:4700::5efe:0:0"):
            assert not is_public(str(IPv6Address(int(IPv6Address(prefix)) + int(address))))
        assert not is_public(str(IPv6Address((0x2002 << 112) + (int(address) << 80))))


@given(st.ip_addresses(v=4))
def test_an_address_is_public_only_if_python_considers_it_global(address: IPv4Address) -> None:
    if not address.is_global or address.is_multicast or address.is_reserved:
        assert not is_public(str(address))
    else:
        assert is_public(str(address)) or any(address in network for network in SPECIAL_IPV4)


async def test_only_the_checked_addresses_of_a_name_are_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    responses = [["10.0.0.1", "8.8.8.8", "9.9.9.9"], ["127.0.0.1"]]

    async def lookup(host: str, port: object, **_kind: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in responses.pop(0)]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    addresses = Addresses("example.com", private_allowed=False)
    assert await addresses.find() == ["8.8.8.8", "9.9.9.9"]
    addresses.prefer("9.9.9.9")
    # Cached for a while; the current result of the name does not matter.
    assert await addresses.find() == ["9.9.9.9", "8.8.8.8"]
    addresses.forget()
    with pytest.raises(PolicyViolation, match="push-private-addresses") as refused:
        await addresses.find()
    # The address of an internal name is logged by the node, but not shown to readers of a dead letter.
    assert "127.0.0.1" not in str(refused.value)
    assert [getattr(record, "addresses", None) for record in caplog.records] == [["127.0.0.1"]]


async def test_a_node_may_be_allowed_to_push_to_private_addresses() -> None:
    assert await Addresses("127.0.0.1", private_allowed=True).find() == ["127.0.0.1"]
    with pytest.raises(PolicyViolation):
        await Addresses("127.0.0.1", private_allowed=False).find()
    # Another notation of the same, where it is understood at all.
    with pytest.raises((PolicyViolation, OSError)):
        await Addresses("2130706433", private_allowed=False).find()


# -- verdicts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (200, Verdict.ACCEPTED),
        (204, Verdict.ACCEPTED),
        (301, Verdict.FAILED),
        (400, Verdict.REFUSED),
        (401, Verdict.FAILED),
        (408, Verdict.FAILED),
        (422, Verdict.REFUSED),
        (429, Verdict.FAILED),
        (500, Verdict.FAILED),
        (503, Verdict.FAILED),
        (0, Verdict.UNREACHABLE),
    ],
)
def test_responses_map_to_verdicts(status: int, verdict: Verdict) -> None:
    assert EndpointResponse(status).verdict is verdict


def test_the_backoff_of_a_message() -> None:
    declared = {"backoff_min_ms": 50, "backoff_max_ms": 1000}
    undeclared = {"backoff_min_ms": 0, "backoff_max_ms": 600_000}
    assert EndpointResponse(503, retry_after_s=7).delay_ms(1, **declared) == 7000
    assert EndpointResponse(503).delay_ms(1, **declared) is None
    assert [EndpointResponse(503).delay_ms(attempt, **undeclared) for attempt in (1, 2, 3, 40)] == [
        1000,
        2000,
        4000,
        600_000,
    ]


def test_retry_after_is_parsed() -> None:
    assert retry_after("120") == 120
    assert retry_after(str(10**9)) == 24 * 3600
    assert 50 < (retry_after(formatdate(time() + 60, usegmt=True)) or 0) <= 61
    assert retry_after(formatdate(time() - 60, usegmt=True)) == 0
    assert [retry_after(text) for text in (None, "", "soon", "-1", "٣")] == [None] * 5


# -- the concurrency of an endpoint ------------------------------------------------------------------------------


def test_an_endpoint_starts_slowly_and_grows_while_in_use() -> None:
    endpoint = Endpoint(100)
    assert (endpoint.limit, endpoint.state) == (1, "unused")
    for _ in range(10):
        endpoint.succeeded(endpoint.limit)
    assert (endpoint.limit, endpoint.state) == (11, "up")
    for _ in range(1000):
        endpoint.succeeded(1)
    assert endpoint.limit == 11
    for _ in range(1000):
        endpoint.succeeded(endpoint.limit)
    assert endpoint.limit == 100


def test_concurrent_failures_count_once() -> None:
    endpoint = Endpoint(100)
    for _ in range(63):
        endpoint.succeeded(endpoint.limit)
    endpoint.failed(began=0.0, now=1.0, under_way=64)
    endpoint.failed(began=0.5, now=1.1, under_way=63)
    assert endpoint.limit == 32
    endpoint.failed(began=1.0, now=2.0, under_way=62)
    assert (endpoint.limit, endpoint.state) == (16, "failing")


def test_an_endpoint_is_down_when_every_request_in_flight_fails() -> None:
    endpoint = Endpoint(100)
    for _ in range(9):
        endpoint.succeeded(endpoint.limit)
    assert endpoint.limit == 10
    for ended in range(9):
        endpoint.failed(began=0.0, now=1.0, under_way=10 - ended)
    assert endpoint.state == "failing"
    endpoint.failed(began=0.0, now=1.0, under_way=1)
    assert endpoint.is_down
    assert endpoint.remaining_pause_s(1.0) == PAUSE_S_MIN
    assert (endpoint.room(0, 1.5), endpoint.room(0, 2.0), endpoint.room(1, 2.0)) == (0, 1, 0)
    # Results of requests sent before add nothing; a probe does.
    endpoint.failed(began=0.0, now=1.5, under_way=1)
    assert endpoint.remaining_pause_s(1.5) == 0.5
    endpoint.failed(began=2.0, now=3.0, under_way=1)
    assert endpoint.remaining_pause_s(3.0) == 2 * PAUSE_S_MIN
    endpoint.succeeded(1)
    assert (endpoint.state, endpoint.limit) == ("up", 2)


def _grown() -> Endpoint:
    endpoint = Endpoint(100)
    for _ in range(200):
        endpoint.succeeded(endpoint.limit)
    assert endpoint.limit == 100
    return endpoint


def test_the_allowed_concurrency_does_not_matter_when_few_requests_are_in_flight() -> None:
    endpoint = _grown()
    for _ in range(DOWN_AFTER):
        assert not endpoint.is_down
        endpoint.failed(began=0.0, now=1.0, under_way=1)
    assert endpoint.is_down


def test_an_endpoint_that_refuses_connections_is_down_once_no_request_in_flight_could_succeed() -> None:
    endpoint = _grown()
    endpoint.failed(began=0.0, now=1.0, under_way=2, is_unsent=True)
    assert endpoint.state == "failing"
    endpoint.succeeded(1)
    assert endpoint.state == "up"
    endpoint.failed(began=1.0, now=2.0, under_way=1, is_unsent=True)
    assert (endpoint.state, endpoint.remaining_pause_s(2.0)) == ("down", PAUSE_S_MIN)


@given(st.lists(st.tuples(st.sampled_from(["ok", "bad", "refused"]), st.floats(0.0, 30.0)), max_size=60))
def test_an_endpoint_never_exceeds_its_limit_and_is_always_retried(steps: list[tuple[str, float]]) -> None:
    endpoint, now, in_a_row = Endpoint(10), 0.0, 0
    for what, passed in steps:
        began, now = now, now + passed
        if what == "ok":
            endpoint.succeeded(endpoint.limit)
            in_a_row = 0
        elif what == "bad":
            endpoint.failed(began, now, endpoint.limit)
            in_a_row += 1
        else:
            endpoint.refused()
        assert 1 <= endpoint.limit <= 10
        assert endpoint.remaining_pause_s(now) <= PAUSE_S_MAX + 0.001
        assert not endpoint.is_down or in_a_row >= DOWN_AFTER
        assert endpoint.room(0, now + PAUSE_S_MAX + 0.001) >= 1


# -- the encoding of messages ------------------------------------------------------------------------------------


def test_a_message_becomes_a_binary_event() -> None:
    content = content_of(message(b'{"a": 1}', (("correlation-id", b"x y"), ("traceparent", b"00-1"))), BINARY)
    assert content.body == b'{"a": 1}'
    assert content.message_id == f"{TOPIC_ID}/2/3".encode()
    assert lines(content) == {
        "ce-specversion": "1.0",
        "ce-id": f"{TOPIC_ID}/2/3",
        "ce-source": "/topics/orders",
        "ce-type": "millstream.message",
        "ce-time": "2023-11-14T22:13:20.123Z",
        "ce-subject": "c7",
        "ce-correlationid": "x%20y",
        "ce-traceparent": "00-1",
        "ce-topic": "orders",
        "ce-partition": "2",
        "ce-offset": "3",
        "ce-attempt": "4",
        "content-type": "application/json",
        "traceparent": "00-1",
    }


def test_an_event_keeps_its_attributes() -> None:
    stored: Headers = (
        ("ce_specversion", b"1.0"),
        ("ce_id", b"e1"),
        ("ce_source", b"/shop"),
        ("ce_type", b"order.created"),
        ("ce_region", "größe".encode()),
        ("ce_Bad-Name", b"x"),
        ("content-type", b"text/plain"),
    )
    reported = lines(content_of(message(b"hello", stored), BINARY))
    assert (reported["ce-id"], reported["ce-source"], reported["ce-type"]) == ("e1", "/shop", "order.created")
    assert reported["ce-region"] == "gr%C3%B6%C3%9Fe"
    assert "ce-Bad-Name" not in reported
    assert reported["content-type"] == "text/plain"


@pytest.mark.parametrize(
    ("value", "content_type", "member"),
    [
        (b'{"a": 1}', None, {"data": {"a": 1}}),
        (b"plain", None, {"data_base64": "cGxhaW4="}),
        (b"plain", b"text/plain; charset=utf-8", {"data": "plain"}),
        (b"\xff", b"text/plain", {"data_base64": "/w=="}),
        (b"{broken", b"application/json", {"data_base64": "e2Jyb2tlbg=="}),
        (b'"\xff"', b"application/json", {"data_base64": "Iv8i"}),
        (None, None, {}),
    ],
)
def test_a_message_becomes_a_structured_event(
    value: bytes | None, content_type: bytes | None, member: dict[str, object]
) -> None:
    headers: Headers = () if content_type is None else (("content-type", content_type),)
    content = content_of(message(value, headers, key=None), STRUCTURED)
    assert lines(content) == {"content-type": "application/cloudevents+json; charset=utf-8"}
    document = json.loads(content.body)
    assert {name: document[name] for name in ("data", "data_base64") if name in document} == member
    assert (document["specversion"], document["offset"], document["type"]) == ("1.0", "3", "millstream.message")
    assert "subject" not in document


def test_a_raw_message_is_sent_unchanged() -> None:
    headers: Headers = (("message-id", b"m 1"), ("region", b"eu"), ("odd name", b"x"), ("region", b"us"))
    content = content_of(message(b"\x00\x01", headers), RAW)
    assert content.body == b"\x00\x01"
    reported = lines(content)
    assert content.message_id == b"m%201"
    assert reported["message-id"] == "m%201"
    assert reported["message-key"] == "c7"
    assert reported["message-header-region"] == "eu"
    assert reported["content-type"] == "application/octet-stream"
    assert "message-header-odd name" not in reported


@settings(max_examples=60)
@given(
    st.binary(max_size=30),
    st.lists(st.tuples(st.text(max_size=8), st.none() | st.binary(max_size=20)), max_size=5),
    st.none() | st.binary(max_size=20),
    st.sampled_from([BINARY, STRUCTURED, RAW]),
)
def test_any_message_can_be_encoded(
    value: bytes, headers: list[tuple[str, bytes | None]], key: bytes | None, layout: str
) -> None:
    content = content_of(message(value, tuple(headers), key), layout)
    for name, text in [*content.headers, (b"webhook-id", content.message_id)]:
        assert name.isascii()
        assert not set(name) & set(b" :\r\n")
        assert all(0x20 <= code < 0x7F for code in text)
    if layout == STRUCTURED:
        json.loads(content.body)
