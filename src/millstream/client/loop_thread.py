"""An event loop in its own thread, for programs that have none, and closing in order at exit."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from millstream.core.errors import InvalidRequest


class Closable(Protocol):
    """An object that the end of the program closes, within a bounded time.

    The `atexit` module runs too late: by then no thread pool accepts work, which closing a log or draining a
    subscription needs. `threading` has a hook at the right time, which thread pools use themselves. On Python versions
    without it, everything ends as if the process was killed, which loses nothing that was acknowledged.
    """

    def close_at_exit(self) -> None:
        """Close cleanly within a bounded time; called from the main thread of the process that registered it."""


_begun: list[tuple[int, weakref.ref[Closable]]] = []
_registered: set[int] = set()


def close_before_exit(thing: Closable) -> None:
    """Close `thing` when the interpreter exits, if it still exists; the last registered is closed first."""
    if os.getpid() not in _registered:
        _registered.add(os.getpid())
        register = getattr(threading, "_register_atexit", None)
        if register is not None:
            register(_end_everything)
    _begun[:] = [(pid, known) for pid, known in _begun if known() is not None]
    _begun.append((os.getpid(), weakref.ref(thing)))


def _end_everything() -> None:
    for pid, known in reversed(_begun):
        thing = known()
        # A forked process has the objects, but not their threads.
        if thing is not None and pid == os.getpid():
            with suppress(Exception):
                thing.close_at_exit()


T = TypeVar("T")

_CLOSE_S_MAX = 60.0


class LoopThread:
    """Runs coroutines for other threads. It ends with `close`, or with the interpreter."""

    def __init__(self, name: str = "millstream client") -> None:
        self._began: Future[asyncio.AbstractEventLoop] = Future()
        self._stopping: asyncio.Event
        self._closing: set[asyncio.Task[None]] = set()
        # A daemon: a program may exit without closing, and would otherwise wait forever.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._loop = self._began.result()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread, with the caller's context variables, and wait for its result.

        If the wait is interrupted, for example by Ctrl-C, the coroutine is cancelled.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise InvalidRequest(
                "this would deadlock: an async handler runs on the client's own loop; make it a plain function"
            )
        future = self.start(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if not self._thread.is_alive():
            coroutine.close()
            raise InvalidRequest("the client is closed; open another one")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def each(self, items: AsyncIterator[T]) -> Generator[T, None, None]:
        try:
            while True:
                try:
                    yield self.call(_next(items))
                except _Exhausted:
                    return
        finally:
            close = getattr(items, "aclose", None) or getattr(items, "close", None)
            if close is not None:
                self.finish(close)

    def finish(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Close something in the thread, unless the client is closed already, and everything with it."""
        if not self._thread.is_alive():
            return
        closing = close()
        if threading.current_thread() is not self._thread:
            self.call(closing)
            return
        # The garbage collector may finalize an iterator in any thread, including the loop's own, which must not wait
        # for itself.
        task = self._loop.create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""
        if self._thread.is_alive():
            with suppress(RuntimeError):  # The loop has just ended.
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(_CLOSE_S_MAX)

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        self._stopping = asyncio.Event()
        self._began.set_result(asyncio.get_running_loop())
        await self._stopping.wait()


class _Exhausted(Exception):
    """The iterator is exhausted. A future cannot carry StopIteration."""


async def _next(items: AsyncIterator[T]) -> T:
    try:
        return await anext(items)
    except StopAsyncIteration:
        raise _Exhausted from None
