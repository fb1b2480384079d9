"""The queue benchmark's client with the Python SDK: one subscriber, with as many concurrent handlers as workers.

python -m benchmarks.queue_sdk --address HOST:PORT --queue TOPIC ...
"""

from __future__ import annotations

import asyncio

import uvloop
from benchmarks.queue_load import Publishers, Run, arguments

import millstream


async def main() -> None:
    options = arguments(__doc__ or "")
    run = Run(options)

    async def handle(message: millstream.Message) -> None:
        value = message.value or b""
        run.record_received(1, (int.from_bytes(value[:8], "little"),) if run.is_timed else ())

    async with millstream.connect(options.address) as ms:
        subscriber = await ms.subscribe(
            options.queue,
            handle,
            name=options.queue,
            start="earliest",
            concurrency=options.workers,
            in_flight=options.batch,
        )
        with Publishers(run) as publishers:
            run.begin()
            publishers.start()
            while not run.is_received:
                # Polling takes CPU time from the workers, so it is frequent only near the end.
                await asyncio.sleep(0.001 if run.is_published else 0.02)
            await subscriber.drain()
            run.record_accepted(run.received)
            run.end()
        await subscriber.unsubscribe(delete=True)


if __name__ == "__main__":
    uvloop.run(main())
