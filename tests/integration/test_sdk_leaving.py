"""Leaving an iteration returns prefetched messages, and uses up no attempts."""

from __future__ import annotations

import millstream
from millstream_testing.server import Server


async def test_leaving_repeatedly_uses_up_no_attempts(server: Server, topic: str) -> None:
    async with millstream.connect(server.kafka) as ms:
        await ms.publish_many(topic, [{"number": number} for number in range(120)])
        seen: list[tuple[int, int]] = []
        while len(seen) < 120:
            async with ms.subscription(topic, name=topic, start="earliest", attempts=2) as stream:
                remaining = 10
                async for message in stream:
                    await message.ack()
                    seen.append((message.json()["number"], message.attempt))
                    remaining -= 1
                    if not remaining:
                        break
        assert sorted(seen) == [(number, 1) for number in range(120)]
    async with millstream.connect(server.kafka) as ms:
        receipt = await ms.publish(topic, {"number": 120})
        async with ms.subscription(topic, name=topic) as stream:
            message = await anext(aiter(stream))
            assert (message.offset, message.attempt) == (receipt.offset, 1)
            await message.ack()
