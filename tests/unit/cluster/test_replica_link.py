"""A follower's link over a real connection: reused buffers, and leaders that do not respond."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import UUID

import pytest

from millstream.broker.cluster import replica_fetcher
from millstream.broker.cluster.membership import Node
from millstream.broker.cluster.replica_fetcher import SMALL_RESPONSES_MAX, WireLink
from millstream.core.errors import BrokerUnreachable
from millstream.core.ids import NodeId, Offset, PartitionIndex
from millstream.protocol.messages.codec import RequestHeader
from millstream.protocol.wire.replica_fetch import (
    VERSION,
    ReplicaFetch,
    ReplicaResponse,
    ReplicaResponses,
    write_replica_responses,
)
from millstream_testing.scripted_broker import FETCH, ScriptedBroker

KEY = UUID(int=7), PartitionIndex(0)
ASKED = ReplicaFetch(NodeId(2), 9, 100, 1 << 20, {})


class Leader:
    """Respond to each fetch with the next number of bytes; None means never."""

    def __init__(self, broker: ScriptedBroker, *sizes: int | None) -> None:
        self.broker = broker
        self.sizes = list(sizes)
        broker.handlers[FETCH] = self.respond

    async def respond(self, header: RequestHeader, _frame: memoryview) -> bytes | None:
        size = self.sizes.pop(0)
        if size is None:
            await asyncio.Event().wait()
        records = bytes([65 + len(self.sizes)]) * (size or 0)
        response = ReplicaResponse(0, Offset(0), Offset(0), None, records)
        pieces = write_replica_responses(VERSION, header.correlation_id, ReplicaResponses(0, 1, {KEY: response}))
        self.broker.write(b"".join(map(bytes, pieces)))
        return None


@pytest.fixture
async def broker() -> AsyncIterator[ScriptedBroker]:
    scripted = ScriptedBroker()
    await scripted.start()
    yield scripted
    await scripted.stop()


@pytest.fixture
async def link(broker: ScriptedBroker) -> AsyncIterator[WireLink]:
    opened = WireLink(lambda: Node(node_id=NodeId(1), host="127.0.0.1", port=broker.port), client_id="replica-2")
    yield opened
    await opened.close()


async def test_large_responses_reuse_the_same_buffer(broker: ScriptedBroker, link: WireLink) -> None:
    sizes = [300_000, 200_000, 10, 250_000, *[10] * (SMALL_RESPONSES_MAX + 1), 250_000]
    Leader(broker, *sizes)
    rooms = []
    for size in sizes:
        records = (await link.fetch(ASKED)).partitions[KEY].records
        assert len(records) == size
        assert len(set(bytes(records))) == 1
        assert isinstance(records, memoryview)
        rooms.append(records.obj)
    assert rooms[0] is rooms[1] is rooms[3]
    # After many small responses, no buffer is kept.
    assert rooms[-1] is not rooms[0]


async def test_a_response_too_large_to_keep_has_its_own_buffer(
    broker: ScriptedBroker, link: WireLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_fetcher, "ROOM_BYTES_MAX", 100_000)
    Leader(broker, 200_000, 200_000)
    first = (await link.fetch(ASKED)).partitions[KEY].records
    second = (await link.fetch(ASKED)).partitions[KEY].records
    assert bytes(first) == b"B" * 200_000
    assert bytes(second) == b"A" * 200_000


async def test_a_silent_leader_is_disconnected_and_reconnected_to(
    broker: ScriptedBroker, link: WireLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    Leader(broker, 10, None, 20)
    # Long enough for the first response on a busy machine.
    monkeypatch.setattr(replica_fetcher, "RESPONSE_S", 1.0)
    assert len((await link.fetch(ASKED)).partitions[KEY].records) == 10
    with pytest.raises(BrokerUnreachable, match="no response in time"):
        await link.fetch(ASKED)
    monkeypatch.setattr(replica_fetcher, "RESPONSE_S", 10.0)
    assert len((await link.fetch(ASKED)).partitions[KEY].records) == 20
    assert broker.connections == 2
