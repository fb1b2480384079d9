"""The queue benchmark's client with Millstream's own requests: all workers in one event loop, each with its own
connections.

A worker requests more messages while an acceptance is in flight. It accepts ranges as they were leased.

    python -m benchmarks.queue_own --address HOST:PORT --queue TOPIC ...
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Final

import msgspec
import uvloop
from benchmarks.queue_load import Publishers, Run, arguments

from millstream.core.subscription import Verb
from millstream.protocol.private.subscription_messages import (
    RECEIVE_KEY,
    SETTLE_KEY,
    PartitionMessages,
    PartitionSettles,
    ReceiveRequest,
    ReceiveResponse,
    SettledRange,
    SettleRequest,
    SettleResponse,
)
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.records.batch import check_crc, iterate_whole_headers
from millstream.protocol.records.record import records_section
from millstream.protocol.wire.client import Client

_WAIT_MS: Final = 1000
_BYTES_MAX: Final = 4 * 1024 * 1024
_ENCODE: Final = msgspec.msgpack.Encoder().encode
_RECEIVED: Final = msgspec.msgpack.Decoder(ReceiveResponse)
_SETTLED: Final = msgspec.msgpack.Decoder(SettleResponse)


class Worker:
    def __init__(self, run: Run, client: Client, number: int) -> None:
        self._run = run
        self._client = client
        self._name = f"worker-{number}"

    async def work(self) -> None:
        """Receive and accept messages until all are accepted."""
        run = self._run
        accepting: asyncio.Task[None] | None = None
        while not run.is_received:
            parts = await self._receive()
            values = [value for part in parts for value in _values(part)]
            if values:
                numbers = [int.from_bytes(value[:8], "little") for value in values] if run.is_timed else ()
                run.record_received(len(values), numbers)
            if accepting is not None:
                await accepting
            accepting = asyncio.get_running_loop().create_task(self._accept(parts, len(values))) if values else None
        if accepting is not None:
            await accepting

    async def _receive(self) -> list[PartitionMessages]:
        options = self._run.given
        request = ReceiveRequest(options.queue, self._name, options.batch, _BYTES_MAX, _WAIT_MS)
        response = _RECEIVED.decode(await self._client.private(None, RECEIVE_KEY, _ENCODE(request), waits=True))
        if response.error:
            raise RuntimeError(response.message)
        return response.partitions

    async def _accept(self, parts: Sequence[PartitionMessages], count: int) -> None:
        settles = [
            PartitionSettles(
                part.topic, part.partition, [SettledRange(lease.start, lease.end, Verb.ACCEPT) for lease in part.leases]
            )
            for part in parts
        ]
        request = SettleRequest(self._run.given.queue, self._name, settles)
        response = _SETTLED.decode(await self._client.private(None, SETTLE_KEY, _ENCODE(request)))
        if response.error or any(code for outcomes in response.results for code, _ in outcomes):
            raise RuntimeError(f"messages could not be accepted: {response}")
        self._run.record_accepted(count)


def _values(part: PartitionMessages) -> Iterator[bytes]:
    """Yield the values of the leased messages, which have no keys here."""
    leased = {offset for lease in part.leases for offset in range(lease.start, lease.end)}
    for header in iterate_whole_headers(part.batches):
        check_crc(part.batches, header)
        section, at = records_section(part.batches, header), 0
        for _ in range(header.record_count):
            length, at = _number(section, at)
            end = at + length
            _, place = _number(section, at + 1)
            delta, place = _number(section, place)
            _, place = _number(section, place)
            size, place = _number(section, place)
            at = end
            if header.base_offset + delta in leased:
                yield section[place : place + size]


def _number(section: bytes, at: int) -> tuple[int, int]:
    """Return a zigzag varint of at most three bytes, and the position after it."""
    byte = section[at]
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), at + 1
    value, byte = byte & 0x7F, section[at + 1]
    if byte < 0x80:
        value |= byte << 7
        return (value >> 1) ^ -(value & 1), at + 2
    value |= (byte & 0x7F) << 7 | section[at + 2] << 14
    return (value >> 1) ^ -(value & 1), at + 3


async def main() -> None:
    options = arguments(__doc__ or "")
    run = Run(options)
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(Client.connect(options.address, client_id=f"worker-{number}"))
            for number in range(options.workers)
        ]
        await SubscriptionClient(clients[0]).create(options.queue, [options.queue], {})
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
        await SubscriptionClient(clients[0]).delete(options.queue)


async def _all_accepted(run: Run, working: Sequence[asyncio.Future[None]]) -> None:
    """Wait until all messages are accepted, but not for workers that still wait for messages."""
    while not run.is_done:
        done = [task for task in working if task.done()]
        for task in done:
            task.result()
        # Polling takes CPU time from the workers, so it is frequent only near the end.
        await asyncio.sleep(0.001 if run.is_published else 0.02)


if __name__ == "__main__":
    uvloop.run(main())
