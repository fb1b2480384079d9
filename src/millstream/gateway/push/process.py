"""The push process: `python -m millstream.gateway.push.process OPTIONS`, started only by `gateway/push/child.py`.

It reads the subscriptions to push from standard input, one JSON line each time, and reports on standard output. It ends
when standard input does: messages in flight may finish and are settled; the rest is returned.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import suppress
from typing import Final

import msgspec

from millstream.core.heap import freeze_heap
from millstream.core.log_format import set_up_logging
from millstream.core.push import headers_of, keys_of
from millstream.core.setting import parse_address
from millstream.core.subscription import AT_MOST_ONCE
from millstream.core.tasks import cancel_and_wait, wait_up_to
from millstream.gateway.api.message import message_bytes
from millstream.gateway.api.record_reader import ReadRecords, RecordReader
from millstream.gateway.push.push_messages import (
    LINE_BYTES_MAX,
    PushCommand,
    PushOptions,
    PushReports,
    PushSubscription,
)
from millstream.gateway.push.pusher import Pusher, Settler
from millstream.gateway.push.sender import Sender, Target, mark_sniffio_missing, trusted
from millstream.protocol.messages.codec import response_body_at
from millstream.protocol.messages.lean_kio import import_lean_kio
from millstream.protocol.private.leasing import LeaseRequests
from millstream.protocol.private.subscription_messages import ReceiveRequest
from millstream.protocol.wire.channel import Pool
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.credentials import adopt_node_credentials
from millstream.protocol.wire.error_codes import error_from_code

_logger = logging.getLogger(__name__)

DRAIN_S: Final = 5.0
"""How long messages in flight may take once the process has to end."""
GIVE_BACK_S: Final = 2.0
REPORT_S: Final = 0.5
"""The minimum time between reports."""
RATES_S: Final = 2.0
RESPONSE_S: Final = 30.0
WAITING_MAX: Final = 10_000
"""The most subscriptions that are pushed, each with a connection while it waits for messages."""


class BrokerConnections:
    def __init__(self, address: str) -> None:
        host, port = parse_address(address, name="kafka")
        self._pool = Pool(host, port, client_id="push", connect_s=RESPONSE_S, borrowed_max=WAITING_MAX)
        self._requests = LeaseRequests()
        self._unpacking = RecordReader(measure=message_bytes)

    async def request(self, key: int, body: bytes) -> memoryview:
        """Send a request that gets a response at once."""
        channel = await self._pool.shared()
        frame = await channel.exchange(key, 0, [body], timeout_s=RESPONSE_S)
        return frame[response_body_at(key, 0, frame) :]

    async def receive(self, request: ReceiveRequest) -> ReadRecords:
        """Receive messages from this node, within limits; a cancelled call leaves nothing leased."""
        leased = await self._requests.receive(self._pool, request, timeout_s=request.wait_ms / 1000 + RESPONSE_S)
        if leased.response.error:
            raise error_from_code(leased.response.error, leased.response.message)
        try:
            return await self._unpacking.read_leased(None, leased, request.max_bytes)
        except BaseException:
            self._requests.return_leases(self._pool, request, leased.response.partitions)
            raise

    async def close(self) -> None:
        await self._requests.close()
        await self._pool.close()
        self._unpacking.close()


class PushProcess:
    def __init__(self, options: PushOptions) -> None:
        self._options = options
        self._line = BrokerConnections(options.kafka)
        self._client = Client.connect(options.kafka, client_id="push", timeout_s=RESPONSE_S)
        self._trust = trusted()
        self._pushers: dict[str, Pusher] = {}
        # Includes pushers that are ending.
        self._running: dict[asyncio.Task[None], Pusher] = {}
        self._changed = asyncio.Event()
        self._has_rates = False

    async def declare(self, subscriptions: list[PushSubscription]) -> None:
        """Push exactly these subscriptions from now on."""
        by_id = {subscription.subscription_id: subscription for subscription in subscriptions}
        for known in [pusher for pusher in self._pushers if pusher not in by_id]:
            self._pushers.pop(known).stop()
        for known, declared in by_id.items():
            pusher = self._pushers.get(known)
            if pusher is None:
                self._start_pusher(known, declared)
            elif pusher.declared != declared:
                await pusher.change(declared, self._sender(declared))
        self._changed.set()

    async def end(self) -> None:
        """Wait for messages in flight; return the rest when time is up."""
        for pusher in self._running.values():
            pusher.stop()
        if self._running:
            await asyncio.wait(self._running, timeout=DRAIN_S)
        for pusher in self._running.values():
            pusher.return_unfinished()
        if self._running:
            await asyncio.wait(self._running, timeout=GIVE_BACK_S)
        await self._line.close()
        await self._client.close()

    async def report(self) -> bytes:
        """Return changed reports as a line; rates change even when nothing happens."""
        await wait_up_to(RATES_S if self._has_rates else None, self._changed)
        self._changed.clear()
        reports = [pusher.report() for pusher in self._pushers.values()]
        self._has_rates = any(report.accepted_per_s or report.failed_per_s for report in reports)
        return msgspec.json.encode(PushReports(reports)) + b"\n"

    def _start_pusher(self, known: str, declared: PushSubscription) -> None:
        worker = self._options.worker
        pusher = Pusher(
            declared,
            worker,
            self._line.receive,
            Settler(declared.name, worker, self._line.request, self._client),
            self._sender(declared),
            on_change=self._changed.set,
        )
        self._pushers[known] = pusher
        task = asyncio.get_running_loop().create_task(pusher.run(), name=f"push {declared.name}")
        self._running[task] = pusher
        task.add_done_callback(self._on_pusher_done)

    def _sender(self, declared: PushSubscription) -> Sender:
        target = Target(
            url=declared.url,
            headers=headers_of(declared.headers) if declared.headers else {},
            keys=tuple(keys_of(declared.secret)) if declared.secret else (),
            timeout_s=declared.timeout_ms / 1000,
            is_once=declared.delivery == AT_MOST_ONCE,
        )
        return Sender(target, self._trust, private_allowed=self._options.private_addresses)

    def _on_pusher_done(self, task: asyncio.Task[None]) -> None:
        pusher = self._running.pop(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # The broker starts another process, which starts over.
            _logger.critical("push failed", extra={"subscription": pusher.declared.name}, exc_info=error)
            sys.exit(1)


async def push(options: PushOptions) -> None:
    """Push until the broker closes the pipe."""
    loop = asyncio.get_running_loop()
    heard = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(heard), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout)
    output = asyncio.StreamWriter(transport, protocol, None, loop)
    process = PushProcess(options)
    reporting = loop.create_task(_report_changes(process, output), name="reports")
    try:
        while line := await heard.readline():
            await process.declare(msgspec.json.decode(line, type=PushCommand).subscriptions)
        await process.end()
    finally:
        await cancel_and_wait(reporting)
        if not transport.is_closing():
            transport.abort()


async def _report_changes(process: PushProcess, output: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while True:
            output.write(await process.report())
            await output.drain()
            await asyncio.sleep(REPORT_S)


def main() -> None:
    """Run with the broker's options."""
    options = msgspec.json.decode(sys.argv[1], type=PushOptions)
    set_up_logging(options.log_level, options.log_format, stream=sys.stderr)
    import_lean_kio()
    adopt_node_credentials()
    mark_sniffio_missing()
    freeze_heap()
    asyncio.run(push(options))


if __name__ == "__main__":
    main()
