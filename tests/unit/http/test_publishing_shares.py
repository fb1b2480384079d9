"""A batch over HTTP for several partitions: partitions are published concurrently, and oversized shares are split."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from millstream.core.errors import BatchTooLarge, NotLeader
from millstream.gateway.api.problem import Refused
from millstream.gateway.api.route import Lane, Request
from millstream.gateway.api.routes import publishing
from millstream.gateway.api.routes.publishing import MESSAGES, PublishedBatch, PublishQuery, publish
from millstream.gateway.api.services import Services
from millstream.gateway.pressure import Pressure, RequestMemory
from millstream.protocol.private.publish_once import PublishOnceResult
from millstream.protocol.records.record import NewRecord
from millstream_testing.waiting import until

PARTITIONS = 8


class Broker:
    """A stand-in for `publish_once`: stores in memory, a limited number of messages per batch."""

    def __init__(self) -> None:
        self.logs: dict[int, list[bytes | None]] = {partition: [] for partition in range(PARTITIONS)}
        self.batch_max = 1000
        self.under_way = self.most = 0
        self.may_respond = asyncio.Event()
        self.may_respond.set()
        self.client = self.publishing = self
        self.pressure = Pressure()

    def throttle_of(self, _topic: str) -> float:
        return 0.0

    async def metadata(self, _topics: Any, *, create: bool) -> Any:
        return SimpleNamespace(topics={"orders": SimpleNamespace(partitions=range(PARTITIONS))})

    async def publish_once(
        self, _client: Any, _topic: str, partition: int, records: Sequence[NewRecord], *, patience_s: float
    ) -> list[PublishOnceResult]:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await self.may_respond.wait()
        self.under_way -= 1
        if len(records) > self.batch_max or any(record.value == b"large" for record in records):
            raise BatchTooLarge("too large")
        if any(record.value == b"lost" for record in records):
            raise NotLeader("nobody leads")
        first = len(self.logs[partition])
        self.logs[partition] += [record.value for record in records]
        return [PublishOnceResult(first + at, 1, True) for at in range(len(records))]

    async def post(self, values: list[tuple[int, str]]) -> list[Any]:
        messages = [{"value": value, "partition": place, "id": f"{at}"} for at, (place, value) in enumerate(values)]
        body = msgspec.json.encode({"messages": messages})
        headers = {b"content-type": MESSAGES.encode()}
        room = RequestMemory(self.pressure, Lane.PUBLISH)
        request = Request({"topic": "orders"}, PublishQuery(deduplicate=True), body, headers, room)
        reported = await publish(cast("Services", self), request)
        assert isinstance(reported, PublishedBatch)
        return [*reported.messages]


@pytest.fixture
async def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    made = Broker()
    monkeypatch.setattr(publishing, "publish_once", made.publish_once)
    return made


async def test_partitions_are_published_concurrently_up_to_a_limit(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "PARTITIONS_AT_ONCE", 3)
    broker.may_respond.clear()
    posting = asyncio.create_task(broker.post([(at % PARTITIONS, f"{at}") for at in range(20)]))
    await until(lambda: broker.under_way >= 3)
    broker.may_respond.set()
    reported = await posting
    assert broker.most == 3
    assert [(receipt.id, receipt.partition, receipt.offset) for receipt in reported] == [
        (f"{at}", at % 8, at // 8) for at in range(20)
    ]


async def test_an_oversized_share_is_split_in_order(broker: Broker) -> None:
    broker.batch_max = 3
    reported = await broker.post([(1, f"{at}") for at in range(10)])
    assert broker.logs[1] == [b"%d" % at for at in range(10)]
    assert [receipt.offset for receipt in reported] == list(range(10))


async def test_oversized_and_lost_messages_are_reported_beside_the_others(broker: Broker) -> None:
    with pytest.raises(Refused) as refused:
        await broker.post([(0, "a"), (0, "large"), (0, "b"), (1, "lost"), (2, "c")])
    outcomes = cast("list[Any]", refused.value.more["messages"])
    assert [isinstance(outcome, dict) for outcome in outcomes] == [False, True, False, True, False]
    assert broker.logs[0] == [b"a", b"b"]
