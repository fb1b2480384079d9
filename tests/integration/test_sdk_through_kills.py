"""A broker killed under publishers and handlers: nothing acknowledged is lost, nothing is duplicated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import millstream
from millstream.protocol.records.record import decode_records
from millstream.protocol.wire.client import Client
from millstream_testing.server import Server

TASKS = 20
EACH = 40


async def stored(address: str, topic: str) -> list[bytes]:
    """Every message of a topic with one partition."""
    values: list[bytes] = []
    async with Client.connect(address) as client:
        at = 0
        end = (await client.list_offsets(topic, {0: -1}))[0].offset
        while at < end:
            for record in decode_records((await client.fetch(topic, 0, at)).records):
                if record.offset >= at:
                    values.append(record.value or b"")
                    at = record.offset + 1
    return values


async def test_no_acknowledged_message_is_lost_and_none_is_published_twice(
    start_server: Callable[..., Server], topic: str
) -> None:
    server = start_server()
    handled: list[str] = []
    receipts: dict[str, millstream.Receipt] = {}
    everything = asyncio.Event()

    async def handle(message: millstream.Message) -> None:
        handled.append(message.text)
        if len(set(handled)) == TASKS * EACH:
            everything.set()

    async with millstream.connect(server.kafka) as ms:
        await ms.subscribe(topic, handle, name=topic, start="earliest", lease=5, attempts=0)

        async def publish(name: int) -> None:
            for at in range(EACH):
                text = f"{name}:{at}"
                receipts[text] = await ms.publish(topic, text)

        async def fail() -> None:
            for part in (0.2, 0.5):
                while len(receipts) < TASKS * EACH * part:
                    await asyncio.sleep(0.005)
                await asyncio.to_thread(restart, server)

        await asyncio.gather(fail(), *(publish(name) for name in range(TASKS)))
        await everything.wait()

    values = await stored(server.kafka, topic)
    assert len(values) == len(set(values)) == TASKS * EACH
    for text, receipt in receipts.items():
        assert values[receipt.offset] == text.encode()


def restart(server: Server) -> Any:
    server.kill()
    return server.start()
