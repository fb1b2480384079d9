"""The queue benchmark's client with Millstream's own requests: all workers in one event loop, each with a connection.

A worker has the acceptance of what it has got under way while it asks for more.

    python -m benchmarks.queue_own --address HOST:PORT --queue TOPIC ...
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final

import uvloop
from benchmarks.queue_load import Publishers, Run, arguments

from millstream.subscriptions.lease import Verb
from millstream.wire.client import Client
from millstream.wire.subscriptions import LeasedMessage, SubscriptionClient

_WAIT_MS: Final = 1000
_BYTES_MAX: Final = 4 * 1024 * 1024


class Worker:
    """One worker with its connection."""

    def __init__(self, run: Run, client: Client, number: int) -> None:
        self._run = run
        self._name = f"worker-{number}"
        self._subscriptions = SubscriptionClient(client)

    async def work(self) -> None:
        """Take and accept, until all is accepted."""
        run = self._run
        accepting: asyncio.Task[None] | None = None
        while not run.is_received:
            messages = await self._receive()
            if accepting is not None:
                await accepting
            if not messages:
                continue
            if run.is_timed:
                run.got(len(messages), [int.from_bytes((one.record.value or b"")[:8], "little") for one in messages])
            else:
                run.got(len(messages))
            accepting = asyncio.get_running_loop().create_task(self._accept(messages))
            # A connection is answered in order: what is accepted goes first.
            await asyncio.sleep(0)
        if accepting is not None:
            await accepting

    async def _receive(self) -> list[LeasedMessage]:
        given = self._run.given
        return await self._subscriptions.receive(
            given.queue, self._name, max_records=given.batch, max_bytes=_BYTES_MAX, wait_ms=_WAIT_MS
        )

    async def _accept(self, messages: list[LeasedMessage]) -> None:
        results = await self._subscriptions.settle(self._run.given.queue, self._name, messages, Verb.ACCEPT)
        self._run.accept(results.count(None))


async def main() -> None:
    """Run from the command line."""
    given = arguments(__doc__ or "")
    run = Run(given)
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(Client.connect(given.address, client_id=f"worker-{number}"))
            for number in range(given.workers)
        ]
        await SubscriptionClient(clients[0]).create(given.queue, [given.queue], {})
        workers = [Worker(run, client, number) for number, client in enumerate(clients)]
        with Publishers(run) as publishers:
            for client in clients:
                await client.metadata(())
            run.begin()
            publishers.start()
            working = [asyncio.ensure_future(worker.work()) for worker in workers]
            await _all_accepted(run, working)
            run.end()
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
        await SubscriptionClient(clients[0]).delete(given.queue)


async def _all_accepted(run: Run, working: Sequence[asyncio.Future[None]]) -> None:
    """Workers that wait for messages when the last is accepted are not waited for."""
    while not run.is_done:
        done = [task for task in working if task.done()]
        for task in done:
            task.result()
        await asyncio.sleep(0.001)


if __name__ == "__main__":
    uvloop.run(main())
