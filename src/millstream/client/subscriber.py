"""Runs a handler on the messages of a subscription; what it returns or raises settles them.

A handler that fails for everything, as when a service it needs is down, would exhaust the attempts of all messages
within moments. Its circuit breaker then opens: waiting messages are returned for other workers, without counting as
delivered, and after pauses that double a few messages are tried, each of them another one, until one succeeds. A try
that fails does not count as delivered either, but delays its message, so that messages which cause the failures do not
hide others that would succeed. Only when nothing has succeeded for a day do tries count, so that all of them end.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import signal
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic
from typing import Any, Final

from millstream.client import tracing
from millstream.client.message import Message, Reject, RetryLater, check_number, milliseconds
from millstream.client.message_stream import Source
from millstream.core.subscription import Verb
from millstream.core.tasks import cancel_and_wait

_logger = logging.getLogger(__name__)

Handler = Callable[[Message], Awaitable[Any]] | Callable[[Message], Any]

DRAIN_S: Final = 30.0
_TURN: Final = 32
"""How many messages a worker handles before other tasks get a turn, if its handler never awaits."""

_GIVE_BACK_S: Final = 5.0
"""How long stopping waits for messages to be returned."""

_REASON_LENGTH_MAX: Final = 1000

FAILED_MESSAGES_MAX: Final = 10
"""How many different messages in a row may fail before the circuit breaker opens: a few may be to blame themselves."""
PAUSE_S_MIN: Final = 1.0
PAUSE_S_MAX: Final = 30.0
TRIES_MAX: Final = 10
"""How many messages are tried after a pause: one after the first, one more after each, and at most this many."""
DELAY_S_MAX: Final = 1800.0
"""A message that was tried is delayed by as long as nothing has succeeded, and at most this long."""
OUTAGE_S_MAX: Final = 24 * 3600.0
"""How long tries do not count as delivered."""

LOGGED_EVERY_S: Final = 60.0
"""How often a failure is logged with its traceback; others of the same kind are counted."""
_KINDS_MAX: Final = 100


class Breaker:
    """Stops a handler that fails for everything, and lets it try one message from time to time."""

    def __init__(self, name: str, throttle: Callable[[int | None], None]) -> None:
        self._name = name
        self._throttle = throttle
        """Limits the number of messages that wait for the handler; None removes the limit."""
        self.is_open = False
        self._opened_at = 0.0
        self._failed: set[tuple[object, int]] = set()
        """The messages that failed since the last success."""
        self._probe: Message | None = None
        self._may_probe = False
        self._pauses = 0
        self._tries_left = 0
        """How many more messages are tried before the next pause."""
        self._pause_s = PAUSE_S_MIN
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    @property
    def has_failures(self) -> bool:
        """Return whether the handler has failed since it last succeeded."""
        return bool(self._failed)

    async def turn(self) -> None:
        """Wait until the handler may have a message."""
        while self.is_open and not self._may_probe:
            self._changed.clear()
            await self._changed.wait()
        self._may_probe = False

    def record_try(self, message: Message) -> None:
        """Record the message that is tried while the breaker is open; no other one is taken meanwhile."""
        self._probe = message
        self._may_probe = False
        self._throttle(0)

    def succeeded(self) -> None:
        """Record that the handler has decided on a message."""
        self._failed.clear()
        if self.is_open:
            _logger.info("the handler of %r works again", self._name)
            self.close()

    def failed(self, message: Message) -> tuple[int, int | None]:
        if self.is_open:
            return self._try_failed() if message is self._probe else (Verb.RETURN, 0)
        self._failed.add((message._lease.where, message.offset))
        if len(self._failed) >= FAILED_MESSAGES_MAX:
            self._open()
        return Verb.RELEASE, None

    def _open(self) -> None:
        self.is_open, self._opened_at = True, monotonic()
        self._throttle(0)
        _logger.warning(
            "the handler of %r fails for every message, %d in a row: waiting messages are returned; one is tried "
            "after %g s, then more after longer pauses",
            self._name,
            len(self._failed),
            self._pause_s,
        )
        self._pause()

    def _try_failed(self) -> tuple[int, int]:
        outage_s = monotonic() - self._opened_at
        self._tries_left -= 1
        if self._tries_left > 0:
            self._try_one()
        else:
            self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
            self._pause()
        delay_s = min(max(outage_s, PAUSE_S_MIN), DELAY_S_MAX)
        return Verb.RETURN if outage_s < OUTAGE_S_MAX else Verb.RELEASE, int(delay_s * 1000)

    def close(self) -> None:
        self.is_open = False
        self._probe = None
        self._pauses = 0
        self._pause_s = PAUSE_S_MIN
        if self._timer is not None:
            self._timer.cancel()
        self._throttle(None)
        self._changed.set()

    def _pause(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._end_pause)

    def _end_pause(self) -> None:
        self._pauses += 1
        self._tries_left = min(self._pauses, TRIES_MAX)
        self._try_one()

    def _try_one(self) -> None:
        self._may_probe = True
        self._throttle(1)
        self._changed.set()


class FailureLog:
    """Logs the failures of a handler, each kind once in a while."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._kinds: dict[object, list[float]] = {}
        """For each kind of failure: when it was last logged, and how many were not logged since."""

    def failed(self, message: Message, error: BaseException) -> None:
        now, kind = monotonic(), _kind(error)
        known = self._kinds.get(kind)
        if known is not None and now - known[0] < LOGGED_EVERY_S:
            known[1] += 1
            return
        if known is None and len(self._kinds) >= _KINDS_MAX:
            self._kinds.pop(next(iter(self._kinds)))
        self._kinds[kind] = [now, 0]
        more = f" (and {known[1]:.0f} times before, not logged)" if known is not None and known[1] else ""
        _logger.warning("the handler of %r failed on message %s%s", self._name, message.id, more, exc_info=error)

    def close(self) -> None:
        count = sum(count for _, count in self._kinds.values())
        self._kinds.clear()
        if count:
            times = "time" if count == 1 else "times"
            _logger.warning("the handler of %r failed %.0f more %s, not logged", self._name, count, times)


def _kind(error: BaseException) -> object:
    """Return the key that groups failures: the type of the error, and the line that raised it."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return type(error), None if at is None else (at.tb_frame.f_code, at.tb_lineno)


class Subscriber:
    """A running handler. `drain` stops it cleanly; so does closing the connection."""

    def __init__(
        self, source: Source, handler: Handler, *, concurrency: int, forget: Callable[[bool], Awaitable[None]]
    ) -> None:
        self._source = source
        self._handler = handler
        self._is_async = _is_async(handler)
        self._concurrency = concurrency
        # One thread per concurrent message, so that neither other subscribers nor the program's own threads delay it.
        self._threads = (
            None if self._is_async else ThreadPoolExecutor(concurrency, thread_name_prefix="millstream handler")
        )
        self._forget = forget
        """Called at the end; with True if the subscription is to be deleted."""
        self._workers: list[asyncio.Task[None]] = []
        self._stop_watcher: asyncio.Task[None] | None = None
        """Does nothing: it is cancelled only when every task of the program is cancelled, to end it."""
        self._is_ending = False
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._draining = False
        self._is_deleted = False
        self._breaker = Breaker(source.subscription, source.throttle)
        self._failure_log = FailureLog(source.subscription)

    @property
    def name(self) -> str:
        """Return the name of the subscription."""
        return self._source.subscription

    async def start(self) -> None:
        """Start handling messages."""
        await self._source.start()
        loop = asyncio.get_running_loop()
        self._stop_watcher = loop.create_task(self._wait_until_stopped())
        for _ in range(self._concurrency):
            self._workers.append(loop.create_task(self._work()))
            self._workers[-1].add_done_callback(self._on_worker_done)

    async def drain(self, timeout: float | None = DRAIN_S) -> None:
        """Receive no more messages, finish those being handled, return those that wait, and stop.

        Messages that cannot be redelivered (at most once, or live) are handled. What is not finished in time is
        cancelled and redelivered, here or elsewhere; None means no limit.
        """
        if timeout is not None:
            check_number("timeout", timeout)
        if self._draining:
            await asyncio.shield(self._stopped)
            return
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                self._source.return_buffered()
                self._breaker.close()
                await self._source.stop()
                if self._workers:
                    await asyncio.wait(self._workers)  # Unlike `gather`, it cancels none of them when the time is up.
                await self._source.flush()
        except TimeoutError:
            _logger.warning("subscription %r was not drained within %g s", self.name, timeout)
        finally:
            await self._stop()
            await self._forget(False)

    async def unsubscribe(self, *, delete: bool = False, timeout: float | None = DRAIN_S) -> None:
        """Stop handling; the subscription remains and collects messages, unless it is deleted."""
        await self.drain(timeout)
        if delete and not self._is_deleted:
            await self._forget(True)
            self._is_deleted = True

    async def run_until_stopped(self) -> None:
        """Handle messages until SIGINT or SIGTERM, until drained, or until nothing can be received any more."""
        loop = asyncio.get_running_loop()
        stop_requested = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(number, stop_requested.set)
        waiting = loop.create_task(stop_requested.wait())
        try:
            ends: list[asyncio.Future[Any]] = [waiting, self._stopped, *self._workers]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await self.drain()
        finally:
            waiting.cancel()
            for number in (signal.SIGINT, signal.SIGTERM):
                with suppress(NotImplementedError, RuntimeError, ValueError):
                    loop.remove_signal_handler(number)
        if self._source.error is not None:
            raise self._source.error

    async def _wait_until_stopped(self) -> None:
        await asyncio.shield(self._stopped)

    async def _stop(self) -> None:
        self._is_ending = True
        await cancel_and_wait(*self._workers)
        self._breaker.close()
        self._failure_log.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_GIVE_BACK_S):
                await self._source.stop_and_return()
        await self._source.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
        if not self._stopped.done():
            self._stopped.set_result(None)
        if self._stop_watcher is not None:
            await asyncio.gather(self._stop_watcher, return_exceptions=True)

    def _on_worker_done(self, worker: asyncio.Task[None]) -> None:
        if not worker.cancelled() and (error := worker.exception()) is not None:
            _logger.error("a worker of subscription %r failed", self.name, exc_info=error)

    # -- handling -------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        source, handler, working_on, breaker = self._source, self._handler, tracing.working_on, self._breaker
        take, accept, cancelling = source.take, source.accept, _cancelling()
        handled = 0
        is_plain = self._is_async and not tracing.is_enabled()
        while True:
            if breaker.is_open:
                await breaker.turn()
            while (message := take()) is None:
                if source.is_exhausted:
                    return
                await source.wait_for_message()
                handled = 0
                is_plain = self._is_async and not tracing.is_enabled()
            if breaker.is_open:
                breaker.record_try(message)
            try:
                if is_plain:
                    working_on(message)
                    await handler(message)
                else:
                    await self._call(message)
            except asyncio.CancelledError as error:
                if cancelling() and not await self._should_continue():
                    source.settle_nowait(message, Verb.RELEASE, 0, "the worker was stopped")
                    raise
                # Something that the handler awaited was cancelled, or the handler itself.
                self._failed(message, error)
            except (GeneratorExit, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                # Including errors that are not an `Exception`, such as those of `pytest.fail`.
                self._failed(message, error)
            else:
                accept(message)
                if breaker.has_failures:
                    breaker.succeeded()
            if cancelling() and not await self._should_continue():
                return
            handled += 1
            if handled == _TURN:
                handled = 0
                is_plain = self._is_async and not tracing.is_enabled()
                await asyncio.sleep(0)

    async def _should_continue(self) -> bool:
        """Return whether a worker continues after a cancellation: if its handler caused it, it is undone."""
        task, bystander = asyncio.current_task(), self._stop_watcher
        if self._is_ending or task is None or bystander is None or bystander.done() or bystander.cancelling():
            return False
        while task.uncancel():
            pass
        with suppress(asyncio.CancelledError):
            # A handler that did not await afterwards has left the cancellation to us.
            await asyncio.sleep(0)
        return not task.cancelling()

    async def _call(self, message: Message) -> None:
        with tracing.handling(message):
            if self._is_async:
                await self._handler(message)
            else:
                context = contextvars.copy_context()
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._threads, context.run, self._handler, message)

    def _failed(self, message: Message, error: BaseException) -> None:
        try:
            self._settle_failed(message, error)
        except Exception:
            # An error that cannot be converted to text must not keep the message here.
            _logger.exception("the handler of %r failed on message %s", self.name, message.id)
            self._source.settle_nowait(message, Verb.RELEASE)

    def _settle_failed(self, message: Message, error: BaseException) -> None:
        settle = self._source.settle_nowait
        if isinstance(error, Reject | RetryLater):
            self._breaker.succeeded()
        if isinstance(error, Reject):
            settle(message, Verb.REJECT, None, _reason(error))
        elif isinstance(error, RetryLater):
            settle(message, Verb.RELEASE, milliseconds(error.seconds), _reason(error))
        else:
            reason = _reason(error)
            verb, delay_ms = self._breaker.failed(message)
            self._failure_log.failed(message, error)
            settle(message, verb, delay_ms, reason)


def _cancelling() -> Callable[[], int]:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a worker is a task")
    return task.cancelling


def _is_async(handler: Handler) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004


def _reason(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    named = text if isinstance(error, Reject | RetryLater) else f"{type(error).__name__}: {text}"
    # Half a surrogate pair, as in file names, cannot be sent.
    return named[:_REASON_LENGTH_MAX].encode(errors="replace").decode()
