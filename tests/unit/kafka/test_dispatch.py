"""Requests that arrive before the broker is up."""

from __future__ import annotations

import asyncio

import pytest
from kio.schema.api_versions.v0.request import ApiVersionsRequest

from millstream.broker.kafka.api import ClientInfo
from millstream.broker.kafka.dispatch import Dispatch
from millstream.broker.net.budget import Budget
from millstream.broker.net.connection import ConnectionLimits
from millstream.broker.net.listener import Listener, bind
from millstream.broker.net.response import Parked
from millstream.protocol.messages.codec import API_VERSIONS_KEY, RequestHeader
from millstream_testing.api_requests import write_request
from millstream_testing.waiting import until


class Waiting(Parked):
    """A request that waits until it is abandoned."""

    def abandon(self) -> None:
        if not self.is_resolved:
            self.resolve(None)


class Waits:
    """Parks every request."""

    key = API_VERSIONS_KEY
    versions = (0, 4)

    def __init__(self) -> None:
        self.parked: list[Waiting] = []

    def handle_frame(self, frame: memoryview, header: RequestHeader, client: ClientInfo) -> Parked:
        self.parked.append(Waiting())
        return self.parked[-1]


@pytest.mark.parametrize("leaves", ["before the broker is up", "afterwards", "altogether"])
async def test_a_request_received_before_the_broker_was_up_ends_with_its_connection(leaves: str) -> None:
    dispatch, api = Dispatch(), Waits()
    limits = ConnectionLimits(frame_bytes_max=1000)
    listener = Listener(dispatch, limits=limits, budget=Budget(1 << 20), connections_max=9, idle_s=600)
    sock = bind("127.0.0.1", 0, flag="kafka")
    await listener.start(sock)
    _, writer = await asyncio.open_connection("127.0.0.1", sock.getsockname()[1])
    writer.write(write_request(1, "test", ApiVersionsRequest()))
    await until(lambda: any(connection._task for connection in listener.connections))
    if leaves == "before the broker is up":
        writer.write_eof()
        await until(lambda: any(connection.presence.has_left for connection in listener.connections))
    dispatch.serve([api])
    await until(lambda: api.parked)
    if leaves == "afterwards":
        writer.write_eof()
    elif leaves == "altogether":
        writer.transport.abort()
    await asyncio.wait_for(api.parked[0], 60)
    writer.close()
    await listener.drain(0)
