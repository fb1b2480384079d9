"""`millstream.connect_sync`: the client for programs without an event loop.

    with millstream.connect_sync("localhost:9092") as ms:
        ms.publish("orders", {"order_id": 1}, key="customer-7")
        subscriber = ms.subscribe("orders", bill, name="billing")
        subscriber.run_until_stopped()

It is the asynchronous client, on a loop in a thread of its own: no method is written twice. Handlers that are plain
functions run in threads, and may use the connection as well. Any thread may.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from types import FrameType
from typing import Any, NoReturn, ParamSpec, Self

from millstream.client.at_exit import end_before_exit
from millstream.client.connection import Connection, connect
from millstream.client.facade import Facade, blocking, iterating, wrapping
from millstream.client.loop_thread import LoopThread
from millstream.client.message import Message
from millstream.client.subscriber import Subscriber
from millstream.protocol.records.record import Headers

P = ParamSpec("P")


class SyncMessage(Facade[Message]):
    """A message of an iterator: all that `Message` has, and its verbs without `await`."""

    # Declared for type checkers; `__getattr__` finds them in the message.
    all_headers: Headers
    attempt: int
    correlation_id: str | None
    deadline: datetime | None
    header_text: Callable[[str], str | None]
    headers: Mapping[str, bytes | None]
    id: str
    is_settled: bool
    json: Callable[..., Any]
    key: bytes | None
    key_text: str | None
    offset: int
    partition: int
    subscription: str | None
    text: str
    timestamp: datetime
    timestamp_ms: int
    topic: str
    traceparent: str | None
    value: bytes | None

    ack = blocking(Message.ack)
    nack = blocking(Message.nack)
    reject = blocking(Message.reject)
    extend = blocking(Message.extend)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


class SyncSubscriber(Facade[Subscriber]):
    """A handler at work."""

    drain = blocking(Subscriber.drain)
    unsubscribe = blocking(Subscriber.unsubscribe)

    @property
    def name(self) -> str:
        """The name of the subscription."""
        return self._wrapped.name

    def run_until_stopped(self) -> None:
        """Handle messages until Ctrl-C or SIGTERM comes, or nothing can be received any more; then drain."""
        with _told_by_signals():
            self._thread.call(self._wrapped.run_until_stopped())
        self.drain()


class SyncConnection(Facade[Connection]):
    """Everything that a program does with Millstream; the methods are those of `Connection`, without `await`."""

    publish = blocking(Connection.publish)
    publish_many = blocking(Connection.publish_many)
    flush = blocking(Connection.flush)
    delivery = blocking(Connection.delivery)
    subscribe = wrapping(Connection.subscribe, SyncSubscriber)
    subscription = iterating(Connection.subscription, SyncMessage)
    listen = iterating(Connection.listen, SyncMessage)

    def __init__(self, wrapped: Connection, thread: LoopThread, *, after: Callable[[], None] | None = None) -> None:
        super().__init__(wrapped, thread)
        self._after = after
        self._is_closed = False
        end_before_exit(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish what handlers are at, send what was published, and close; a program that forgets it ends so, too."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._thread.call(self._wrapped.close())
        finally:
            self._thread.close()
            if self._after is not None:
                self._after()

    def end_at_exit(self) -> None:
        """Close when the interpreter ends."""
        self.close()


def opened(open_one: Callable[[], Connection], *, after: Callable[[], None] | None = None) -> SyncConnection:
    """A connection on a loop in a thread of its own; `after` it is closed, something else may be to end."""

    async def begin() -> Connection:
        return await open_one().__aenter__()

    thread = LoopThread()
    try:
        return SyncConnection(thread.call(begin()), thread, after=after)
    except BaseException:
        thread.close()
        raise


def _synchronous(open_one: Callable[P, Connection]) -> Callable[P, SyncConnection]:
    @functools.wraps(open_one)
    def call(*args: P.args, **kwargs: P.kwargs) -> SyncConnection:
        return opened(lambda: open_one(*args, **kwargs))

    call.__name__ = call.__qualname__ = "connect_sync"
    return call


connect_sync = _synchronous(connect)


class _Told(Exception):
    """A signal came."""


@contextmanager
def _told_by_signals() -> Iterator[None]:
    """End the block, and nothing else, when a signal asks the process to end. Only the main thread hears of signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def tell(_number: int, _frame: FrameType | None) -> NoReturn:
        raise _Told

    before = signal.signal(signal.SIGTERM, tell)
    try:
        with suppress(_Told, KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)
