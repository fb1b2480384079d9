"""The errors of `millstream publish` when the cluster cannot accept messages."""

from __future__ import annotations

from typing import Any, cast

import pytest

from millstream.cli import publish
from millstream.client import publisher as publishing
from millstream.client.admin import cluster_status
from millstream.core.errors import BrokerUnreachable, PublishFailed, RequestTimedOut, StorageFailure
from millstream.protocol.wire.client import Client


class Publisher:
    """A publisher stand-in whose publishes all fail."""

    error: Exception = RequestTimedOut("no response in time")

    def __init__(self, client: Client, **_: Any) -> None:
        pass

    async def publish_many(self, topic: str, records: Any, *, partition: int | None) -> Any:
        raise self.error

    async def close(self) -> None:
        pass


async def output(monkeypatch: pytest.MonkeyPatch, error: Exception, status: Any) -> Exception:
    async def no_status(_client: Client, _node: object = None) -> Any:
        if status is None:
            raise BrokerUnreachable("away")
        return status

    monkeypatch.setattr(publishing, "Publisher", Publisher)
    monkeypatch.setattr(Publisher, "error", error)
    monkeypatch.setattr(cluster_status, "node_status", no_status)
    order = publish._Order(
        topic="orders",
        value="x",
        file=None,
        key=None,
        key_separator=None,
        headers=(),
        delay_s=None,
        partition=None,
        compression="none",
        timeout_s=1.0,
        print_ids=False,
        as_json=False,
    )
    with pytest.raises(Exception) as raised:  # noqa: PT011
        await publish._publish(cast("Client", None), order)
    return raised.value


async def test_the_cluster_is_asked_for_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    late = RequestTimedOut("no response in time")
    reported = await output(monkeypatch, late, {"reasons": ["the catalog is away since noon"]})
    assert isinstance(reported, RequestTimedOut)
    assert str(reported).startswith(
        "cannot publish to 'orders' now, no response in time: the catalog is away since noon;"
    )
    assert await output(monkeypatch, late, None) is late
    assert str(await output(monkeypatch, late, {})).startswith(
        "cannot publish to 'orders' now, no response in time; try again"
    )


async def test_of_several_failed_messages_the_first_error_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    full = StorageFailure("the disk is full")
    assert await output(monkeypatch, PublishFailed(["a receipt", full, full]), {}) is full
