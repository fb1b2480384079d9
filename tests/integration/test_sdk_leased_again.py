"""A restarted node forgets recent leases: their holders continue, and receive no message twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import millstream
from millstream_testing.server import Server
from millstream_testing.waiting import until

HANG_S = 150
COUNT = 4


async def test_messages_leased_again_after_a_restart_are_not_handled_twice(
    start_server: Callable[..., Server], topic: str
) -> None:
    server = start_server()
    handled: list[str] = []
    last, gate = asyncio.Event(), asyncio.Event()

    async def handle(message: millstream.Message) -> None:
        handled.append(message.text)
        if len(handled) == COUNT:
            # At once, before the leases are durable.
            server.kill()
        if message.text == "last":
            last.set()
        await gate.wait()

    async with asyncio.timeout(HANG_S), millstream.connect(server.kafka) as ms:
        receipts = await ms.publish_many(topic, [str(at) for at in range(COUNT)])
        await ms.subscribe(topic, handle, name=topic, start="earliest", concurrency=4 * COUNT)
        await until(lambda: len(handled) >= COUNT)
        await asyncio.to_thread(server.start)
        receipts.append(await ms.publish(topic, "last"))
        # The others precede it, so they were redelivered by now.
        await last.wait()
        gate.set()
        for receipt in receipts:
            assert (await ms.delivery(receipt, subscription=topic, wait=HANG_S)).state == "accepted"
        assert sorted(handled) == [*map(str, range(COUNT)), "last"]
