"""Arguments of the SDK that cannot be meant are refused at once, by their name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

import millstream
from millstream.client.declaration import wanted_settings
from millstream.model.errors import (
    BrokerUnreachable,
    InvalidRequest,
    InvalidSubscription,
    InvalidTopicName,
)
from millstream.testing.cluster_network import free_ports

NOTHING: dict[str, Any] = dict.fromkeys(
    ("filter", "delivery", "ordered", "lease", "attempts", "backoff", "dead_letter", "start", "expires")
)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"acks": "most"}, "acks must be"),
        ({"acks": 2}, "acks must be"),
        ({"compression": "brotli"}, "compression must be one of none"),
        ({"linger": -1}, "linger must be"),
        ({"linger": math.nan}, "linger must be"),
        ({"timeout": "30"}, "timeout must be"),
        ({"publish_timeout": -1}, "publish_timeout must be"),
        ({"buffer_bytes": 0}, "buffer_bytes must be"),
    ],
)
def test_options_are_checked_when_they_are_given(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        millstream.connect("localhost:9092", **options)


def test_an_address_is_a_text() -> None:
    connect: Callable[..., Any] = millstream.connect
    with pytest.raises(InvalidRequest, match=r"localhost:9092.*not 9092"):
        connect(9092)
    with pytest.raises(InvalidRequest, match="address"):
        connect()


def test_all_is_what_acks_is_called_elsewhere() -> None:
    millstream.connect("localhost:9092", acks="all")


async def test_whoever_connects_to_nobody_is_told_what_python_can_do() -> None:
    with pytest.raises(BrokerUnreachable, match=r"to millstream\.connect") as told:
        async with millstream.connect(f"127.0.0.1:{free_ports(1)[0]}"):
            pass
    assert "--brokers" not in str(told.value)


@pytest.fixture
def ms() -> Any:
    """A connection that is not open: what cannot be meant is refused before anybody is asked."""
    return millstream.connect("localhost:9092")


@pytest.mark.parametrize(("topic", "told"), [(None, "topic must be"), ("a b", "letters, digits"), ("", "empty")])
async def test_a_topic_has_a_name(ms: Any, topic: Any, told: str) -> None:
    with pytest.raises(InvalidTopicName, match=told):
        await ms.publish(topic, 1)
    with pytest.raises(InvalidTopicName, match=told):
        await ms.publish_many(topic, [1])
    with pytest.raises(InvalidTopicName, match=told):
        await ms.subscribe([topic], print, name="billing")
    with pytest.raises(InvalidTopicName):
        await ms.subscribe(topic, print, name="billing")


@pytest.mark.parametrize("values", ["abc", b"abc", {"a": 1}, 5])
async def test_many_values_are_not_one(ms: Any, values: Any) -> None:
    with pytest.raises(InvalidRequest, match="values must be a list"):
        await ms.publish_many("orders", values)


async def test_a_handler_can_be_called(ms: Any) -> None:
    async def handle() -> None:
        pass

    called = handle()
    for handler in (None, "handle", called):
        with pytest.raises(InvalidSubscription, match="handler must be a function"):
            await ms.subscribe("orders", handler, name="billing")
    called.close()


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
async def test_what_listens_live_declares_nothing(ms: Any, asked: dict[str, Any]) -> None:
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
def test_a_subscription_begins_where_people_say(start: str, setting: str) -> None:
    assert wanted_settings(**NOTHING | {"start": start}) == {"share.auto.offset.reset": setting}


def test_a_subscription_begins_so_long_ago() -> None:
    assert wanted_settings(**NOTHING | {"start": "2h"})["share.auto.offset.reset"].startswith("at:1")


@pytest.mark.parametrize("start", ["yesterday", "17", 17, "by_duration:never", "at:noon"])
def test_a_beginning_that_is_none_is_refused_by_name(start: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^start"):
        wanted_settings(**NOTHING | {"start": start})
