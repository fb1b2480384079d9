"""`millstream.open("./data")`: the broker inside the program, on the code path of `millstream serve`.

    async with millstream.open("./data") as ms:
        await ms.publish("orders", {"order_id": 1})

The broker has its own thread and event loop. So leases are kept and Kafka clients are served even while the program
blocks its loop, and the program's loop keeps running during a long recovery. The client talks to the broker over the
loopback interface, on a free port unless `kafka` names one: nothing is different from a broker elsewhere. No gateway is
started unless `http` names an address.

What belongs to the whole process stays as it is: signal handlers, the event loop policy, logging, the collector. Log
lines go to the logger `millstream`, which the program may listen to.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Literal, Unpack

from millstream.client.connection import AccessOptions, Connection, connect
from millstream.client.loop_thread import close_before_exit
from millstream.client.sync_connection import SyncConnection, opened
from millstream.core.config import Config
from millstream.core.errors import BrokerUnreachable, InvalidSetting

_logger = logging.getLogger(__name__)

FREE_PORT = "127.0.0.1:0"
_STOP_S_MAX = 60.0
"""How long an ending interpreter waits for a broker that was not stopped."""


class EmbeddedBroker:
    """A broker in a thread of this process: `await start()`, use `kafka_address`, `await stop()`."""

    def __init__(
        self,
        data: str | os.PathLike[str],
        *,
        kafka: str = FREE_PORT,
        http: str = "",
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self._config = config_of(data, kafka=kafka, http=http, settings=settings)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._stop_requested = False
        self._ready: Future[None] = Future()
        self._ended: Future[None] = Future()
        self.kafka_address = ""
        """The address for clients, once the broker is started."""
        self.http_address = ""
        """The gateway's address, if one is requested."""

    async def start(self) -> None:
        """Start, and wait until clients can connect; a failed start leaves nothing behind."""
        self._begin()
        try:
            await _without_cancelling(self._ready)
        except asyncio.CancelledError:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop gracefully, as SIGTERM stops a server; raise if a part of the broker had failed meanwhile."""
        if self._request_stop():
            await _without_cancelling(self._ended)

    def start_and_wait(self) -> None:
        """Start, from a program without an event loop."""
        self._begin()
        self._ready.result()

    def stop_and_wait(self, timeout_s: float | None = None) -> None:
        """Stop, from a program without an event loop."""
        if self._request_stop():
            self._ended.result(timeout_s)

    def _begin(self) -> None:
        if self._thread is not None:
            raise RuntimeError("the broker has already been started")
        # A daemon thread: a program that ends without stopping the broker must not hang.
        self._thread = threading.Thread(target=self._run, name="millstream broker", daemon=True)
        close_before_exit(self)
        self._thread.start()

    def close_at_exit(self) -> None:
        """Stop gracefully if the program did not."""
        self.stop_and_wait(_STOP_S_MAX)

    def _request_stop(self) -> bool:
        """Request a stop; return whether there is an end to wait for."""
        if self._thread is None:
            return False
        self._stop_requested = True
        if self._loop is not None and self._stopping is not None:
            with suppress(RuntimeError):  # The loop has already ended.
                self._loop.call_soon_threadsafe(self._stopping.set)
        return True

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._serve())
        except BaseException as error:
            if self._ready.done():
                self._ended.set_exception(error)
            else:
                self._ready.set_exception(error)
        if not self._ended.done():
            self._ended.set_result(None)

    async def _serve(self) -> None:
        from millstream.broker.node import Broker
        from millstream.child_processes import CHILD_PROCESSES

        stopping = self._stopping = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self._stop_requested:
            raise BrokerUnreachable("the broker was stopped before it was started")
        broker = Broker(self._config, children=CHILD_PROCESSES, is_embedded=True)
        await broker.start()
        try:
            self.kafka_address, self.http_address = broker.kafka_address, broker.http_address
            self._ready.set_result(None)
            broker.failed.add_done_callback(lambda _: stopping.set())
            await stopping.wait()
        finally:
            await broker.stop()
        if broker.failed.done():
            await broker.failed


class ConnectOptions(AccessOptions, total=False):
    """The options of `millstream.connect` besides the addresses."""

    client_id: str
    timeout: float
    connect_timeout: float
    publish_timeout: float
    linger: float
    compression: str
    acks: int | Literal["all"]
    batch_bytes: int
    buffer_bytes: int
    receipts: str | Path | None


@asynccontextmanager
async def open(
    data: str | os.PathLike[str],
    *,
    kafka: str = FREE_PORT,
    http: str = "",
    settings: Mapping[str, object] | None = None,
    **options: Unpack[ConnectOptions],
) -> AsyncIterator[Connection]:
    """Open a broker inside this program, with its data in a folder, and connect to it.

    `kafka` and `http` are addresses at which other programs can use the broker, too; `settings` are those of a node, by
    flag name; the rest is as for `millstream.connect`. The broker stops gracefully at the end of the block.
    """
    broker = EmbeddedBroker(data, kafka=kafka, http=http, settings=settings)
    await broker.start()
    try:
        async with connect(broker.kafka_address, **options) as connection:
            yield connection
    finally:
        await broker.stop()


def open_sync(
    data: str | os.PathLike[str],
    *,
    kafka: str = FREE_PORT,
    http: str = "",
    settings: Mapping[str, object] | None = None,
    **options: Unpack[ConnectOptions],
) -> SyncConnection:
    """Open a broker, from a program without an event loop; closing the connection stops it."""
    broker = EmbeddedBroker(data, kafka=kafka, http=http, settings=settings)
    broker.start_and_wait()
    try:
        return opened(lambda: connect(broker.kafka_address, **options), after=broker.stop_and_wait)
    except BaseException:
        broker.stop_and_wait()
        raise


async def _without_cancelling(awaited: Future[None]) -> None:
    """Wait for the thread without cancelling what happens there."""
    waiting = asyncio.wrap_future(awaited)
    # Retrieved here, since no one else does so after a cancellation.
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.shield(waiting)


def config_of(data: str | os.PathLike[str], *, kafka: str, http: str, settings: Mapping[str, object] | None) -> Config:
    """Return the settings of an embedded broker: neither the environment nor a `millstream.toml` changes them."""
    fixed = {"data": os.fspath(data), "kafka": kafka, "http": http}
    twice = sorted(fixed.keys() & (settings or {}).keys())
    if twice:
        raise InvalidSetting(f"{twice[0]} is a separate parameter; remove it from settings")
    return Config.of(fixed | dict(settings or {}))
