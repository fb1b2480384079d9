"""Invalid SDK arguments are refused immediately, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

import millstream
from millstream.cli.local_process import ReservedPort
from millstream.client.connection import requested_settings
from millstream.core.errors import (
    BrokerUnreachable,
    InvalidRequest,
    InvalidSubscription,
    InvalidTopicName,
)
from millstream.core.subscription import BACKOFF_MIN
from millstream_testing.producer_ledger import ProducerLedger


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"acks": "most"}, "acks must be"),
        ({"acks": 2}, "acks must be"),
        ({"compression": "brotli"}, "compression must be one of none"),
        ({"linger": -1}, "linger must be"),
        ({"linger": math.nan}, "linger must be"),
        ({"timeout": "30"}, "timeout must be"),
        ({"publish_timeout": -1}, "publish_timeout must be"),
        ({"connect_timeout": None}, "connect_timeout must be"),
        ({"buffer_bytes": 0}, "buffer_bytes must be"),
        ({"batch_bytes": 1.5}, "batch_bytes must be a whole number"),
        ({"client_id": 5}, "client_id must be a string"),
        ({"acks": True}, "acks must be"),
        ({"receipts": 5}, "receipts must be a file name"),
        ({"tls": ("ca.pem", "alice.pem", "alice.key")}, r"tls must be the file .* load_cert_chain"),
    ],
)
def test_options_are_checked_when_given(options: dict[str, Any], reported: str) -> None:
    with pytest.raises(InvalidRequest, match=reported):
        millstream.connect("localhost:9092", **options)


def test_an_unknown_option_is_refused_by_the_public_name() -> None:
    connect: Callable[..., Any] = millstream.connect
    with pytest.raises(TypeError, match=r"^connect\(\) got an unexpected keyword argument 'foo'$"):
        connect("localhost:9092", foo=1)


def test_an_address_must_be_a_string() -> None:
    connect: Callable[..., Any] = millstream.connect
    with pytest.raises(InvalidRequest, match=r"localhost:9092.*not 9092"):
        connect(9092)
    with pytest.raises(InvalidRequest, match="address"):
        connect()


def test_acks_accepts_the_spelling_all() -> None:
    millstream.connect("localhost:9092", acks="all")


async def test_a_failed_connect_gives_advice_in_terms_of_the_sdk() -> None:
    unowned = ReservedPort()
    address = unowned.address
    with pytest.raises(BrokerUnreachable, match=r"to millstream\.connect") as reported:
        async with millstream.connect(address, connect_timeout=0.1):
            pass
    assert f"no broker responded at {address} within 0.1 s ({address}: connection refused)" in str(reported.value)
    assert "--brokers" not in str(reported.value)


@pytest.fixture
def ms() -> Any:
    """A connection that is not open: invalid arguments are refused before any request."""
    return millstream.connect("localhost:9092")


@pytest.mark.parametrize(("topic", "reported"), [(None, "topic must be"), ("a b", "letters, digits"), ("", "empty")])
async def test_a_topic_must_have_a_valid_name(ms: Any, topic: Any, reported: str) -> None:
    with pytest.raises(InvalidTopicName, match=reported):
        await ms.publish(topic, 1)
    with pytest.raises(InvalidTopicName, match=reported):
        await ms.publish_many(topic, [1])
    with pytest.raises(InvalidTopicName, match=reported):
        await ms.subscribe([topic], print, name="billing")
    with pytest.raises(InvalidTopicName):
        await ms.subscribe(topic, print, name="billing")


@pytest.mark.parametrize("values", ["abc", b"abc", {"a": 1}, 5])
async def test_publish_many_refuses_a_single_value(ms: Any, values: Any) -> None:
    with pytest.raises(InvalidRequest, match="values must be a list"):
        await ms.publish_many("orders", values)


async def test_a_handler_must_be_callable(ms: Any) -> None:
    async def handle() -> None:
        pass

    called = handle()
    for handler in (None, "handle", called):
        with pytest.raises(InvalidSubscription, match="handler must be a function"):
            await ms.subscribe("orders", handler, name="billing")
    called.close()


async def test_a_handler_must_take_exactly_one_message(ms: Any) -> None:
    class Handler:
        async def handle(self) -> None:
            pass

        async def __call__(self, message: object, *, dry: bool) -> None:
            pass

    async def more(message: object, connection: object) -> None:
        pass

    for handler in (lambda: None, Handler().handle, Handler(), more):
        with pytest.raises(InvalidSubscription, match="handler must take a message"):
            await ms.subscribe("orders", handler, name="billing")


@pytest.mark.parametrize(("backoff", "settings"), [(5, {BACKOFF_MIN: "5000"}), (0.25, {BACKOFF_MIN: "250"})])
def test_a_backoff_may_be_one_number(backoff: float, settings: dict[str, str]) -> None:
    assert requested_settings({"backoff": backoff}) == settings


@pytest.mark.parametrize(
    ("changed_settings", "problem"),
    [
        ({"lease": 0.01}, "lease (in seconds) must be at least 0.1, not 0.01"),
        ({"lease": 99_999}, "lease (in seconds) must be at most 43200, not 99999"),
        ({"attempts": 1000}, "attempts must be at most 200, not 1000"),
        ({"backoff": (9, 1)}, "backoff"),
        ({"delivery": "twice"}, "delivery must be one of at-most-once, at-least-once, exactly-once, not 'twice'"),
    ],
)
def test_an_invalid_value_is_refused_by_its_argument_name(changed_settings: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        requested_settings(changed_settings)
    assert str(raised.value).startswith(problem)
    assert "share." not in str(raised.value)
    assert "millstream." not in str(raised.value)


def test_seconds_are_rounded_to_milliseconds() -> None:
    assert requested_settings({"lease": 1.001}) == {"share.record.lock.duration.ms": "1001"}


@pytest.mark.parametrize(
    "asked",
    [
        {"name": "billing"},
        {"filter": "payload.total > 1"},
        {"ordered": False},
        {"start": "earliest"},
        {"lease": 5},
        {"update": True},
    ],
)
async def test_a_live_listener_declares_nothing(ms: Any, asked: dict[str, Any]) -> None:
    (name,) = asked
    with pytest.raises(InvalidSubscription, match=f"live=True.*{name}"):
        await ms.subscribe("orders", print, live=True, **asked)


@pytest.mark.parametrize(
    ("start", "setting"),
    [
        ("start", "earliest"),
        ("earliest", "earliest"),
        ("end", "latest"),
        ("latest", "latest"),
        ("at:5", "at:5"),
        ("by_duration:P7D", "by_duration:P7D"),
        ("2026-01-01T00:00:00Z", "at:1767225600000"),
    ],
)
def test_a_subscription_starts_at_a_named_position(start: str, setting: str) -> None:
    assert requested_settings({"start": start}) == {"share.auto.offset.reset": setting}


def test_a_subscription_starts_at_a_time_in_the_past() -> None:
    assert requested_settings({"start": "2h"})["share.auto.offset.reset"].startswith("at:1")


@pytest.mark.parametrize("start", ["yesterday", "17", 17, "by_duration:never", "at:noon"])
def test_an_invalid_start_is_refused_by_name(start: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^start"):
        requested_settings({"start": start})


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ({"partition": "0"}, "partition must be a whole number of at least 0, not '0'"),
        ({"partition": True}, "partition must be"),
        ({"partition": -1}, "partition must be"),
        ({"partition": [0]}, "partition must be"),
        ({"correlation_id": 5}, "correlation_id must be a string, not 5"),
        ({"deduplicate": "no", "id": "a"}, "deduplicate must be True or False, not 'no'"),
    ],
)
async def test_an_invalid_publish_names_the_wrong_argument(given: dict[str, Any], reported: str) -> None:
    async with ProducerLedger.started() as ledger, millstream.connect(ledger.broker.address) as ms:
        with pytest.raises(InvalidRequest, match=reported):
            await ms.publish("orders", "a", **given)
        if "partition" in given:
            with pytest.raises(InvalidRequest, match=reported):
                await ms.publish_many("orders", ["a"], **given)
            with pytest.raises(InvalidRequest, match=reported):
                await ms.publish("orders", "a", id="a", deduplicate=True, **given)
        if "correlation_id" in given:
            with pytest.raises(InvalidRequest, match=reported):
                await ms.publish_many("orders", [millstream.NewMessage("a", **given)])


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ({"name": b"billing"}, "name must be a string"),
        ({"concurrency": "3"}, "concurrency must be a whole number of at least 1, not '3'"),
        ({"concurrency": 1.5}, "concurrency must be"),
        ({"in_flight": None}, "in_flight must be"),
        ({"filter": 5}, "filter must be a string"),
        ({"ordered": "yes"}, "ordered must be True or False"),
        ({"lease": "5"}, "lease must be a number of at least 0, not '5'"),
        ({"lease": math.nan}, "lease must be"),
        ({"expires": math.inf}, "expires must be"),
        ({"attempts": "3"}, "attempts must be a whole number"),
        ({"backoff": True}, "backoff must be a number of at least 0, not True"),
        ({"backoff": (1,)}, "backoff must be a number of seconds, or a pair"),
        ({"backoff": ("1", "2")}, "backoff must be a number of at least 0, not '1'"),
        ({"dead_letter": 5}, "dead_letter must be a string"),
        ({"update": "yes"}, "update must be True or False"),
        ({"live": "no"}, "live must be True or False"),
        ({"leese": 5}, "no 'leese'; the settings are: filter, delivery"),
    ],
)
async def test_an_invalid_subscription_names_the_wrong_argument(ms: Any, given: dict[str, Any], reported: str) -> None:
    with pytest.raises(InvalidSubscription, match=reported):
        await ms.subscribe("orders", print, **{"name": "billing", **given})
    if "concurrency" not in given and "live" not in given:
        with pytest.raises(InvalidSubscription, match=reported):
            async with ms.subscription("orders", **{"name": "billing", **given}):
                pass


async def test_a_receipt_must_come_from_a_publish(ms: Any) -> None:
    receipt = millstream.Receipt("orders", 0, 0, 0, "")
    for start in (("orders", 0, 0), None):
        with pytest.raises(InvalidRequest, match="receipt must be a receipt that publish returned"):
            await ms.delivery(start, subscription="billing")
    with pytest.raises(InvalidRequest, match="subscription must be a string"):
        await ms.delivery(receipt, subscription=5)
    for wait in ("5", math.inf):
        with pytest.raises(InvalidRequest, match="wait must be a number"):
            await ms.delivery(receipt, subscription="billing", wait=wait)


async def test_lists_are_received_and_acknowledged_as_lists(ms: Any) -> None:
    stream = ms.subscription("orders", name="billing")
    for count in ("5", 0):
        with pytest.raises(InvalidRequest, match="count must be a whole number of at least 1"):
            await anext(stream.batches(count))
    for messages in (None, ["a"]):
        with pytest.raises(InvalidRequest, match="messages must be a list of messages"):
            await stream.ack(messages)
