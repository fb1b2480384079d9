from __future__ import annotations

import base64
import time
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.core.ids import NodeId, Offset
from millstream.gateway.api.message import in_one_line, received
from millstream.gateway.api.new_message import (
    NewMessage,
    from_batch,
    from_headers,
    from_members,
    from_request,
    structured_decoder,
)
from millstream.gateway.api.problem import Refused
from millstream.gateway.api.routes.pulling import read_token, token_of
from millstream.protocol.private.subscriptions import LeasedMessage
from millstream.protocol.records.record import Record

TOPIC_ID = UUID(int=7)


def test_a_request_defines_every_field_of_its_message() -> None:
    headers = {
        b"content-type": b"text/plain",
        b"message-key": b"k",
        b"message-id": b"m-1",
        b"message-partition": b"3",
        b"message-deliver-at": b"2026-01-31T12:00:00Z",
        b"message-header-x-region": b"eu",
        b"correlation-id": b"c",
        b"traceparent": b"00-1",
        b"user-agent": b"nobody's",
    }
    placed = from_request(headers, b"value")
    assert (placed.record.key, placed.record.value) == (b"k", b"value")
    assert (placed.partition, placed.id) == (3, b"m-1")
    assert dict(placed.record.headers) == {
        "content-type": b"text/plain",
        "message-id": b"m-1",
        "x-region": b"eu",
        "correlation-id": b"c",
        "traceparent": b"00-1",
        "deliver-at": b"1769860800000",
    }


def test_the_default_content_type_of_http_clients_is_not_stored() -> None:
    placed = from_request({b"content-type": b"application/x-www-form-urlencoded; charset=utf-8"}, b"x")
    assert placed.record.headers == ()


def test_a_delay_is_relative_to_now() -> None:
    placed = from_request({b"message-delay": b"1.5"}, b"x")
    ((name, value),) = placed.record.headers
    assert name == "deliver-at"
    assert abs(int(value or b"") - (time.time() + 1.5) * 1000) < 60_000


@pytest.mark.parametrize(
    "headers",
    [
        {b"message-delay": b"-1"},
        {b"message-delay": b"nan"},
        {b"message-deliver-at": b"tomorrow"},
        {b"message-deliver-at": b"5", b"message-delay": b"5"},
        {b"message-deliver-at": b"2026-01-31T12:00:00"},
        {b"message-partition": b"-1"},
        {b"message-id": b""},
        {b"message-id": b"x" * 2000},
        {b"message-header-": b"x"},
    ],
)
def test_invalid_requests_are_refused(headers: dict[bytes, bytes]) -> None:
    with pytest.raises(Refused):
        from_request(headers, b"x")


@pytest.mark.parametrize(
    "output",
    [
        {"value": "a", "json": 1},
        {"value": "a", "base64": "YQ=="},
        {"base64": "***"},
        {"key": "a", "key_base64": "YQ=="},
        {"deliver_at": "soon"},
        {"deliver_at": "5", "delay": 0},
    ],
)
def test_a_message_of_a_batch_has_exactly_one_value_and_one_key(output: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        from_batch(msgspec.json.decode(msgspec.json.encode(output), type=NewMessage))


BROKEN = base64.b64encode(b'{"a": "\xff"}').decode()


@pytest.mark.parametrize(
    "output",
    [
        {"value": "{broken", "headers": {"content-type": "application/json"}},
        {"value": "", "headers": {"content-type": "application/vnd.shop.order+json; charset=utf-8"}},
        {"base64": BROKEN, "headers": {"content-type": "application/json"}},
    ],
)
def test_a_message_declared_as_json_must_be_json(output: dict[str, Any]) -> None:
    def read(**more: Any) -> Any:
        return from_batch(msgspec.convert({**output, **more}, NewMessage))

    with pytest.raises(Refused, match="not JSON"):
        read()
    assert read(headers={}).record.value is not None
    assert read(value="{}", base64=None).record.value == b"{}"
    assert read(value=None, base64=None).record.value is None


def test_json_in_a_batch_is_encoded_as_text() -> None:
    message = msgspec.json.decode(b'{"json": "\xff"}', type=NewMessage)
    with pytest.raises(Refused, match="not JSON"):
        from_batch(message)


@pytest.mark.parametrize("name", [b"content-type", b"message-header-content-type"])
def test_a_body_declared_as_json_must_be_json(name: bytes) -> None:
    with pytest.raises(Refused, match="not JSON"):
        from_request({name: b"application/json"}, b"{broken")


def test_event_data_declared_as_json_must_be_json() -> None:
    assert event(data_base64="e30=", datacontenttype="application/json").record.value == b"{}"
    with pytest.raises(Refused, match="not JSON"):
        event(data_base64="/w==", datacontenttype="application/json")


EVENT = {"specversion": "1.0", "id": "e", "source": "/s", "type": "t"}


def event(**members: Any) -> Any:
    return from_members(structured_decoder.decode(msgspec.json.encode({**EVENT, **members})))


def test_the_data_of_an_event_is_the_value() -> None:
    assert event(data={"a": 1}).record.value == b'{"a":1}'
    assert event(data="text", datacontenttype="text/plain").record.value == b"text"
    assert event(data="text").record.value == b'"text"'
    assert event(data_base64="/w==").record.value == b"\xff"
    assert event().record.value is None
    assert dict(event(data=1, ownnumber=7, flag=True, gone=None).record.headers) == {
        "content-type": b"application/json",
        "ce_specversion": b"1.0",
        "ce_id": b"e",
        "ce_source": b"/s",
        "ce_type": b"t",
        "ce_ownnumber": b"7",
        "ce_flag": b"true",
        "message-id": b"e",
    }


@pytest.mark.parametrize(
    "members", [{"id": ""}, {"specversion": "0.3"}, {"Own": "x"}, {"own": [1]}, {"data": 1, "data_base64": "YQ=="}]
)
def test_an_invalid_event_is_refused(members: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        event(**members)


def test_a_binary_event_requires_the_mandatory_attributes() -> None:
    headers = {f"ce-{name}".encode(): value.encode() for name, value in EVENT.items()}
    headers[b"ce-subject"] = b"caf%C3%A9"
    placed = from_headers(headers, from_request({b"message-id": b"own"}, b"x"))
    assert (placed.id, dict(placed.record.headers)["ce_subject"]) == (b"own", "café".encode())
    for name in list(EVENT):
        missing = {key: value for key, value in headers.items() if key != f"ce-{name}".encode()}
        with pytest.raises(Refused):
            from_headers(missing, from_request({}, b"x"))


@settings(max_examples=50)
@given(
    key=st.none() | st.binary(max_size=20),
    value=st.none() | st.binary(max_size=50),
    headers=st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=5)), max_size=3, unique_by=lambda pair: pair[0]),
)
def test_a_received_message_can_be_republished_unchanged(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes]]
) -> None:
    record = Record(Offset(1), 0, key, value, tuple(headers))
    document = msgspec.json.decode(msgspec.json.encode(received("t", TOPIC_ID, 0, record)))
    sent = {name: document[name] for name in ("key", "key_base64", "value", "base64") if name in document}
    again = from_batch(msgspec.convert(sent, NewMessage)).record
    assert (again.key, again.value) == (key, value)


def test_a_value_is_returned_as_json_if_the_message_says_so() -> None:
    def shown(value: bytes, content_type: bytes) -> Any:
        record = Record(Offset(1), 0, None, value, (("content-type", content_type),))
        return msgspec.json.decode(in_one_line(msgspec.json.encode(received("t", TOPIC_ID, 0, record))))

    assert shown(b'{\n"a": 1}', b"application/json; charset=utf-8")["json"] == {"a": 1}
    assert shown(b"{broken", b"application/json")["value"] == "{broken"
    assert shown(b"{}", b"text/plain")["value"] == "{}"


@settings(max_examples=50)
@given(text=st.text(max_size=60))
def test_a_token_is_parsed_as_a_lease_or_refused(text: str) -> None:
    with pytest.raises(Refused):
        read_token(text)


def test_a_token_identifies_the_lease() -> None:
    message = LeasedMessage(NodeId(1), "t", TOPIC_ID, 3, 2, 99, Record(Offset(17), 0, None, None, ()))
    lease = read_token(token_of(message, "http/w"))
    assert (lease.topic, lease.partition, lease.offset, lease.attempt, lease.worker) == ("t", 3, 17, 2, "http/w")
