"""Encoding published values as bytes and headers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest

from millstream.client.connection import SubscriptionOptions, requested_settings
from millstream.client.message import Lease, read_leased
from millstream.client.payload import NewMessage, due_ms, encoded, headers_of, key_bytes
from millstream.core.errors import InvalidRequest, InvalidSetting, InvalidSubscription
from millstream.core.ids import message_id
from millstream.protocol.private.subscription_messages import LeasedRange
from millstream.protocol.records.record import NewRecord, encode_batch


@dataclass
class Order:
    order_id: int


@pytest.mark.parametrize(
    ("value", "content", "kind"),
    [
        (b"x", b"x", None),
        (None, None, None),
        (memoryview(b"x"), b"x", None),
        ("é", "é".encode(), b"text/plain; charset=utf-8"),
        ({"a": 1}, b'{"a":1}', b"application/json"),
        (True, b"true", b"application/json"),
        (Order(7), b'{"order_id":7}', b"application/json"),
    ],
)
def test_values_become_bytes(value: object, content: bytes | None, kind: bytes | None) -> None:
    assert encoded(value) == (content, () if kind is None else (("content-type", kind),))


def test_a_value_that_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="object"):
        encoded(object())
    with pytest.raises(InvalidRequest, match="key"):
        key_bytes(7)  # type: ignore[arg-type]
    values: list[Any] = [object(), 5, 1.5, True]
    for value in values:
        with pytest.raises(InvalidRequest, match="header 'a' must be a string, bytes or None, not"):
            headers_of({"a": value}, ())
    with pytest.raises(InvalidRequest, match="empty"):
        headers_of((), (), message_id="")
    with pytest.raises(InvalidRequest, match="time zone"):
        due_ms(datetime(2026, 1, 1))


class Price(msgspec.Struct):
    amount: float


@pytest.mark.parametrize("value", [math.nan, {"x": math.inf}, [None, (1, -math.inf)], Price(math.nan)])
def test_numbers_that_json_lacks_are_refused(value: object) -> None:
    with pytest.raises(InvalidRequest, match="no NaN and no infinity"):
        encoded(value)


def test_nested_null_values_are_kept() -> None:
    assert encoded({"none": None, "n": [1.5, "null"]})[0] == b'{"none":null,"n":[1.5,"null"]}'


@pytest.mark.parametrize("headers", [["a"], ["ab"], "ab", 5, [("a", "b", "c")], {5: "a"}, {"": "a"}, [(None, b"")]])
def test_invalid_headers_are_refused_by_name(headers: Any) -> None:
    with pytest.raises(InvalidRequest, match="headers must"):
        headers_of(headers, ())


@pytest.mark.parametrize("delay", [-5, timedelta(seconds=-1), math.nan, math.inf, "5", -0.001])
def test_an_invalid_delay_is_refused_by_name(delay: Any) -> None:
    with pytest.raises(InvalidRequest, match="delay must be"):
        headers_of((), (), delay=delay)


def test_the_value_of_a_new_message_is_positional() -> None:
    assert NewMessage("x", key="k") == NewMessage(value="x", key="k")


def test_headers_carry_the_type_and_the_due_time() -> None:
    kind = (("content-type", b"application/json"),)
    assert headers_of((), kind) is kind
    assert headers_of({"content-type": "x", "n": "5", "none": None}, kind) == (
        ("content-type", b"x"),
        ("n", b"5"),
        ("none", None),
    )
    assert headers_of([("a", b"1"), ("a", "2")], kind, "m-1") == (
        ("a", b"1"),
        ("a", b"2"),
        *kind,
        ("message-id", b"m-1"),
    )
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    assert headers_of((), (), delay=moment) == (("deliver-at", b"1767225600000"),)
    assert due_ms(1.5, moment) == due_ms(timedelta(seconds=1.5), moment) == 1767225601500


def test_requested_settings_have_their_configuration_names() -> None:
    assert requested_settings({}) == {}
    options: SubscriptionOptions = {"ordered": True, "lease": 1.5, "backoff": (1, 60), "start": timedelta(hours=1)}
    assert requested_settings(options) == {
        "millstream.ordered": "true",
        "share.record.lock.duration.ms": "1500",
        "millstream.backoff.min.ms": "1000",
        "millstream.backoff.max.ms": "60000",
        "share.auto.offset.reset": "by_duration:PT3600S",
    }
    at = requested_settings({"start": datetime(2026, 1, 1, tzinfo=UTC)})
    assert at == {"share.auto.offset.reset": "at:1767225600000"}
    with pytest.raises(InvalidSubscription, match="time zone"):
        requested_settings({"start": datetime(2026, 1, 1)})
    with pytest.raises(InvalidSetting):
        requested_settings({"delivery": "sometimes"})


def test_a_message_has_only_one_id() -> None:
    both: list[Any] = [{"message-id": "a"}, [("message-id", b"a")]]
    for headers in both:
        with pytest.raises(InvalidRequest, match="one id"):
            headers_of(headers, (), "b")
    given_headers = headers_of([("message-id", None), ("message-id", "a"), ("message-id", "b")], ())
    written = encode_batch([NewRecord(None, b"", given_headers)], base_offset=0)
    no_one: Any = None
    lease = Lease("orders", UUID(int=7).bytes, 3, settler=no_one)
    (message,) = read_leased(bytes(written), [LeasedRange(0, 1, 1, 0)], lease)
    assert message.id == message_id(lease.topic_id, 3, 0, given_headers) == "a"
    (message,) = read_leased(
        bytes(encode_batch([NewRecord(None, b"")], base_offset=0)), [LeasedRange(0, 1, 1, 0)], lease
    )
    assert message.id == f"{UUID(int=7)}/3/0"
