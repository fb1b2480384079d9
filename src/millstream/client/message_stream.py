"""Messages of a subscription or a topic as an asynchronous iterator; the caller settles them."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Self

from millstream.client.message import Message, check_integer
from millstream.core.errors import InvalidRequest, MillstreamError


class Source:
    """Receives messages and buffers them until they are taken, one after another.

    What settles and returns messages does nothing here: it is overridden where messages are leased.
    """

    def __init__(self, subscription: str) -> None:
        self.subscription = subscription
        self.error: MillstreamError | None = None
        """The reason why no more messages will come."""
        self._loop = asyncio.get_running_loop()
        self._buffer: deque[Message] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        """Workers that wait for a message."""
        self._stopping = False

    @property
    def is_exhausted(self) -> bool:
        """Return whether no more messages will come."""
        return (self._stopping or self.error is not None) and not self._buffer

    @abstractmethod
    async def start(self) -> None:
        """Start receiving."""

    @abstractmethod
    def take(self) -> Message | None:
        """Return the next message, if there is one."""

    @abstractmethod
    def take_many(self, count: int) -> list[Message]:
        """Return at most this many of the next messages."""

    async def wait_for_message(self) -> None:
        """Wait until there may be a message, or no more will come."""
        self._idle.append(self._loop.create_future())
        await self._idle[-1]

    def settle_nowait(self, message: Message, verb: int, delay_ms: int | None = None, reason: str = "") -> None:
        """Settle a message without waiting for the response."""

    def accept(self, message: Message) -> None:
        """Accept a message without waiting for the response."""

    def accept_many(self, messages: Sequence[Message]) -> list[asyncio.Future[None]]:
        """Accept messages; the futures complete when that is durable."""
        return []

    async def flush(self) -> None:
        """Wait until everything is settled."""

    def stop_renewing(self, message: Message) -> None:
        """Stop renewing the lease of a message whose consumer has moved on to the next one."""

    def stop_renewing_all(self, messages: Sequence[Message]) -> None:
        """Stop renewing several leases; most of the messages are settled."""

    def throttle(self, limit: int | None) -> None:
        """Limit the number of waiting messages, and return the surplus; None removes the limit."""

    def return_buffered(self) -> None:
        """Return waiting messages that can be redelivered, now and as they arrive; others are still to be taken."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop receiving; waiting messages may still be taken."""

    async def stop_and_return(self) -> None:
        """Stop, and return messages that were not taken, so that others get them at once."""
        await self.stop()

    async def leave(self) -> None:
        """Stop, return messages that were not taken, and close when the others are settled or their leases end."""
        await self.close()

    @abstractmethod
    async def close(self) -> None:
        """Stop, and abandon unsettled messages."""

    def _fail(self, error: MillstreamError) -> None:
        self.error = error
        self._wake(len(self._idle))

    def _wake(self, count: int) -> None:
        idle = self._idle
        while idle and count > 0:
            waiting = idle.popleft()
            if not waiting.done():
                waiting.set_result(None)
                count -= 1


class MessageStream:
    """`async for message in stream`: each message is leased while the body handles it, until it is settled.

    A message that the body leaves unsettled is redelivered when its lease ends. As a context manager, or when the
    connection closes, the stream returns the messages it holds. So does a stream that is no longer referenced, such as
    that of a loop that was left; messages that the loop has taken may still be settled while their leases last.
    """

    def __init__(self, start: Callable[[], Awaitable[Source]], on_left: Callable[[Source], None] | None = None) -> None:
        self._start = start
        self._left = on_left
        """Called, in any thread, with a source from which no more messages are taken."""
        self._receiver: Source | None = None
        self._current: Message | None = None
        self.is_closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        if self._receiver is None and self.is_closed:
            raise StopAsyncIteration
        receiver = await self._started()
        if self._current is not None:
            receiver.stop_renewing(self._current)
        while True:
            message = receiver.take()
            if message is not None:
                self._current = message
                return message
            if receiver.error is not None:
                raise receiver.error
            if receiver.is_exhausted:
                raise StopAsyncIteration
            await receiver.wait_for_message()

    async def batches(self, count: int = 1000) -> AsyncIterator[list[Message]]:
        """Yield the available messages, at most this many at a time; `ack` settles them together."""
        check_integer("count", count, 1)
        source = await self._started()
        while True:
            messages = source.take_many(count)
            if messages:
                yield messages
                source.stop_renewing_all(messages)
                continue
            if source.error is not None:
                raise source.error
            if source.is_exhausted:
                return
            await source.wait_for_message()

    async def ack(self, messages: Sequence[Message]) -> None:
        """Accept messages: none of them is delivered again. Returns when that is durable.

        Raises the first error after all have been settled; `InvalidRecordState` for messages that are no longer held.
        """
        if not isinstance(messages, Sequence) or set(map(type, messages)) - {Message}:
            raise InvalidRequest(f"messages must be a list of messages from this stream, not {messages!r:.100}")
        source = await self._started()
        outcomes = await asyncio.gather(*source.accept_many(messages), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def _started(self) -> Source:
        if self._receiver is None:
            self._receiver = await self._start()
        return self._receiver

    async def __aenter__(self) -> Self:
        await self._started()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def __del__(self) -> None:
        self._leave()

    async def aclose(self) -> None:
        """End the stream; messages that were taken may still be settled."""
        self._leave()

    def _leave(self) -> None:
        if self._receiver is not None and self._left is not None and not self.is_closed:
            self.is_closed = True
            self._left(self._receiver)

    async def close(self) -> None:
        """Receive no more messages, and return the buffered ones."""
        self.is_closed = True
        if self._receiver is not None:
            await self._receiver.stop_and_return()
            await self._receiver.close()
