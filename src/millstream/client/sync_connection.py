"""`millstream.connect_sync`: the client for programs without an event loop.

    with millstream.connect_sync("localhost:9092") as ms:
        ms.publish("orders", {"order_id": 1}, key="customer-7")
        subscriber = ms.subscribe("orders", bill, name="billing")
        subscriber.run_until_stopped()

It is the asynchronous client, on a loop in its own thread: no method is written twice. Handlers that are plain
functions run in threads, and may use the connection as well. Any thread may.
"""

from __future__ import annotations

import functools
import inspect
import signal
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from types import FrameType, MethodType
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, Self, TypeVar, cast, overload

from millstream.client.connection import Connection, connect
from millstream.client.loop_thread import LoopThread, close_before_exit
from millstream.client.message import Message
from millstream.client.message_stream import MessageStream
from millstream.client.subscriber import DRAIN_S, Subscriber
from millstream.core.errors import InvalidRequest
from millstream.protocol.records.record import Headers

A = TypeVar("A")

P = ParamSpec("P")

T = TypeVar("T")

W = TypeVar("W", bound="SyncFacade[Any]")


class SyncFacade(Generic[A]):
    """An asynchronous object, and the thread that its methods run in."""

    __slots__ = ("_thread", "_wrapped")

    def __init__(self, wrapped: A, thread: LoopThread) -> None:
        self._wrapped = wrapped
        self._thread = thread

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._wrapped!r}>"


class _Delegate(Generic[A, P, T]):
    """A method of another class, called in the thread."""

    def __init__(self, method: Callable[..., Any], call: Callable[..., T]) -> None:
        self.__doc__ = method.__doc__
        self.__wrapped__ = method
        self._call = call

    @overload
    def __get__(self, facade: None, owner: type) -> _Delegate[A, P, T]: ...

    @overload
    def __get__(self, facade: SyncFacade[A], owner: type) -> Callable[P, T]: ...

    def __get__(self, facade: SyncFacade[A] | None, owner: type) -> _Delegate[A, P, T] | Callable[P, T]:
        return self if facade is None else cast("Callable[P, T]", MethodType(self._call, facade))


def blocking(method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]]) -> _Delegate[A, P, T]:
    """Call a coroutine method and wait for its result."""

    @functools.wraps(method)
    def call(facade: SyncFacade[A], *args: P.args, **kwargs: P.kwargs) -> T:
        return facade._thread.call(method(facade._wrapped, *args, **kwargs))

    return _Delegate(method, call)


def wrapping(method: Callable[Concatenate[A, P], Any], facade_class: type[W]) -> _Delegate[A, P, W]:
    """Call a method, which may be a coroutine method, and wrap its result."""

    @functools.wraps(method)
    def call(facade: SyncFacade[A], *args: P.args, **kwargs: P.kwargs) -> W:
        result = facade._thread.call(_call_on_loop(method, facade._wrapped, *args, **kwargs))
        return facade_class(result, facade._thread)

    return _Delegate(method, call)


async def _call_on_loop(method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a plain method on the loop, where it can find the running loop."""
    result = method(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


class SyncMessage(SyncFacade[Message]):
    """A message of an iterator, with the verbs of `Message` without `await`."""

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

    decode = blocking(Message.decode)
    ack = blocking(Message.ack)
    nack = blocking(Message.nack)
    reject = blocking(Message.reject)
    extend = blocking(Message.extend)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


class SyncMessageStream(SyncFacade[MessageStream]):
    """Iterates over messages; as a context manager, it starts and ends with the block."""

    __slots__ = ("_messages",)

    def __init__(self, wrapped: MessageStream, thread: LoopThread) -> None:
        super().__init__(wrapped, thread)
        self._messages = _each_message(wrapped, thread)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> SyncMessage:
        return next(self._messages)

    def __enter__(self) -> Self:
        self._thread.call(self._wrapped.__aenter__())
        return self

    def __exit__(self, *exception: object) -> None:
        self._messages.close()
        self._thread.call(self._wrapped.close())

    def batches(self, count: int = 1000) -> Generator[list[SyncMessage], None, None]:
        """Yield the available messages, at most this many at a time; `ack` settles them together."""
        thread = self._thread
        return _each_batch(thread.each(self._wrapped.batches(count)), thread)

    def ack(self, messages: Sequence[SyncMessage]) -> None:
        """Accept messages: none of them is delivered again. Returns when that is durable.

        Raises the first error after all have been settled; `InvalidRecordState` for messages that are no longer held.
        """
        if not isinstance(messages, Sequence) or set(map(type, messages)) - {SyncMessage}:
            raise InvalidRequest(f"messages must be a list of messages from this stream, not {messages!r:.100}")
        self._thread.call(self._wrapped.ack([message._wrapped for message in messages]))

    def close(self) -> None:
        """End the iteration; messages that were taken may still be settled."""
        self._messages.close()
        self._thread.finish(self._wrapped.aclose)


def _each_message(stream: MessageStream, thread: LoopThread) -> Generator[SyncMessage, None, None]:
    with closing(thread.each(stream)) as messages:
        for message in messages:
            yield SyncMessage(message, thread)


def _each_batch(
    batches: Generator[list[Message], None, None], thread: LoopThread
) -> Generator[list[SyncMessage], None, None]:
    with closing(batches):
        for messages in batches:
            yield [SyncMessage(message, thread) for message in messages]


class SyncSubscriber(SyncFacade[Subscriber]):
    """A running handler."""

    drain = blocking(Subscriber.drain)
    unsubscribe = blocking(Subscriber.unsubscribe)

    @property
    def name(self) -> str:
        """Return the name of the subscription."""
        return self._wrapped.name

    def run_until_stopped(self) -> None:
        """Handle messages until Ctrl-C or SIGTERM, or until nothing can be received any more; then drain."""
        with _stopped_by_signals():
            self._thread.call(self._wrapped.run_until_stopped())
        self.drain()


class SyncConnection(SyncFacade[Connection]):
    """A program's connection to Millstream, with the methods of `Connection` without `await`."""

    publish = blocking(Connection.publish)
    publish_many = blocking(Connection.publish_many)
    flush = blocking(Connection.flush)
    delivery = blocking(Connection.delivery)
    leases = blocking(Connection.leases)
    subscribe = wrapping(Connection.subscribe, SyncSubscriber)
    subscription = wrapping(Connection.subscription, SyncMessageStream)
    listen = wrapping(Connection.listen, SyncMessageStream)

    def __init__(self, wrapped: Connection, thread: LoopThread, *, after: Callable[[], None] | None = None) -> None:
        super().__init__(wrapped, thread)
        self._after = after
        self._is_closed = False
        close_before_exit(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self, timeout: float | None = DRAIN_S) -> None:
        """Wait for handlers, send published messages, and close; also done when the interpreter exits."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._thread.call(self._wrapped.close(timeout))
        finally:
            self._thread.close()
            if self._after is not None:
                self._after()

    def close_at_exit(self) -> None:
        """Close when the interpreter exits."""
        self.close()


def opened(open_one: Callable[[], Connection], *, after: Callable[[], None] | None = None) -> SyncConnection:
    """Open a connection on a loop in its own thread; call `after` when it is closed."""

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


class _StopSignal(Exception):
    """A signal arrived."""


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """End the block, and nothing else, on a signal to stop. Only the main thread receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        raise _StopSignal

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with suppress(_StopSignal, KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)
