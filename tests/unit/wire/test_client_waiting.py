"""The client against a slow scripted broker: waiting requests, throttling, timeouts."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
from datetime import timedelta
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from millstream.core.errors import BrokerUnreachable, RequestTimedOut
from millstream.core.ids import NodeId
from millstream.protocol.messages import codec
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.channel import Pool
from millstream.protocol.wire.client import Client
from millstream_testing.scripted_broker import FETCH, METADATA, PRODUCE, Handler, ScriptedBroker, fetched, produced

NODE = NodeId(1)
JOIN_GROUP = 11


def batch(*, producer_id: int = -1) -> bytearray:
    return encode_batch([NewRecord(None, b"hello", (), 1)], producer_id=producer_id, producer_epoch=0, base_sequence=0)


def connect(broker: ScriptedBroker, timeout_s: float = 60.0) -> Client:
    return Client.connect(broker.address, client_id="test", timeout_s=timeout_s)


async def test_a_waiting_group_member_blocks_nothing_else(broker: ScriptedBroker) -> None:
    requests: Any = importlib.import_module("kio.schema.join_group.v9.request")
    responses: Any = importlib.import_module("kio.schema.join_group.v9.response")
    joined, release = asyncio.Event(), asyncio.Event()

    async def hold(header: codec.RequestHeader, frame: memoryview) -> Any:
        joined.set()
        await release.wait()
        return responses.JoinGroupResponse(
            throttle_time=timedelta(0),
            error_code=ErrorCode.none,
            generation_id=1,
            protocol_type="consumer",
            protocol_name="range",
            leader="m",
            skip_assignment=False,
            member_id="m",
            members=(),
        )

    broker.served[JOIN_GROUP] = (0, 9)
    broker.handlers[JOIN_GROUP] = hold
    request = requests.JoinGroupRequest(
        group_id="g",
        session_timeout=timedelta(seconds=10),
        rebalance_timeout=timedelta(seconds=10),
        member_id="",
        group_instance_id=None,
        protocol_type="consumer",
        protocols=(),
        reason=None,
    )
    async with connect(broker) as client:
        joining = asyncio.create_task(client.send(NODE, request))
        await joined.wait()
        assert (await client.metadata()).cluster_id == "test-cluster"
        assert not joining.done()
        release.set()
        assert (await joining).generation_id == 1


async def test_a_connection_with_a_cancelled_request_is_not_reused(broker: ScriptedBroker) -> None:
    async with connect(broker) as client:
        pool = await client.pool_for(NODE)
        async with pool.borrowed() as withdrawn:
            withdrawn.end_writing()
            with pytest.raises(BrokerUnreachable):
                await withdrawn.send(METADATA, 13, [b""])
        async with pool.borrowed() as another:
            assert another is not withdrawn


async def test_a_throttle_time_applies_to_every_caller(broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(Pool, "mute", lambda _pool, seconds: asked.append(seconds))

    def throttled(handler: Handler, throttle_ms: int) -> Handler:
        async def handle(header: codec.RequestHeader, frame: memoryview) -> Any:
            response = await handler(header, frame)
            return dataclasses.replace(response, throttle_time=timedelta(milliseconds=throttle_ms))

        return handle

    broker.handlers[METADATA] = throttled(broker.respond_to_metadata, 250)
    broker.handlers[PRODUCE] = throttled(produced(ErrorCode.none), 500)
    broker.handlers[FETCH] = throttled(fetched(b"batches"), 750)
    async with connect(broker) as client:
        await client.produce("orders", 0, batch())
        await client.fetch("orders", 0, 0, max_wait_ms=0)
    assert asked == [0.25, 0.5, 0.75]


@pytest.mark.parametrize("version", list(range(3, 13)))
async def test_the_throttle_time_is_found_in_every_version_of_produce(broker: ScriptedBroker, version: int) -> None:
    broker.served[PRODUCE] = (0, version)
    broker.handlers[PRODUCE] = produced(ErrorCode.none)
    async with connect(broker) as client:
        assert (await client.produce("orders", 0, batch())).base_offset == 42


async def test_a_throttling_broker_is_sent_nothing_until_the_time_is_over() -> None:
    pool = Pool("127.0.0.1", 1, client_id="test", connect_s=1)
    assert await pool.unmuted() == 0
    pool.mute(0.02)
    pool.mute(0.01)
    assert await pool.unmuted() > 0
    assert await pool.unmuted() == 0


async def test_produce_takes_no_longer_than_the_clients_own_timeout(broker: ScriptedBroker) -> None:
    waits: list[timedelta] = []

    async def ignore_request(header: codec.RequestHeader, frame: memoryview) -> Any:
        waits.append(codec.read_request(PRODUCE, header.version, frame, header.body_at).timeout)

    broker.handlers[PRODUCE] = ignore_request
    async with connect(broker) as client:
        await client.leader_of("orders", 0)
        client._timeout_s = 0.3
        with pytest.raises(RequestTimedOut, match=r"within 0\.[0-3]"):
            await client.produce("orders", 0, batch(producer_id=7))
    assert [wait <= timedelta(seconds=0.3) for wait in waits] == [True]
