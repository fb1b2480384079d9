"""Whatever a handler does, its message is settled and the worker continues."""

from __future__ import annotations

import asyncio
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from millstream.client import subscriber as module
from millstream.client.idempotent_handler import IdempotentHandler
from millstream.client.message import Lease, Message, Reject, RetryLater
from millstream.client.message_stream import Source
from millstream.client.subscriber import Handler, Subscriber
from millstream.core.errors import InvalidRequest
from millstream.core.subscription import Verb
from millstream_testing.waiting import until

HANG_S = 60


class ScriptedSource(Source):
    """A source that yields the given messages, then waits; it records their settlements."""

    def __init__(self, count: int) -> None:
        super().__init__("billing")
        lease = Lease("orders", b"0" * 16, 0, settler=self)
        self.messages = [Message(lease, offset, 0, None, b"", b"\x00", 1) for offset in range(count)]
        self.settled: dict[int, tuple[int, int | None, str]] = {}
        self._count = count
        self.limits: list[int | None] = []
        self.limit: int | None = None
        self._woken = asyncio.Event()
        self._all = asyncio.Event()

    async def start(self) -> None:
        pass

    def take(self) -> Message | None:
        return self.messages.pop(0) if self.messages and self.limit != 0 else None

    def take_many(self, count: int) -> list[Message]:
        raise NotImplementedError

    async def wait_for_message(self) -> None:
        self._woken.clear()
        await self._woken.wait()

    def settle(self, message: Message, verb: int, delay_ms: int | None, reason: str) -> asyncio.Future[None]:
        raise NotImplementedError

    def settle_nowait(self, message: Message, verb: int, delay_ms: int | None = None, reason: str = "") -> None:
        self.settled[message.offset] = verb, delay_ms, reason
        if len(self.settled) == self._count:
            self._all.set()

    def accept(self, message: Message) -> None:
        self.settle_nowait(message, Verb.ACCEPT)

    async def flush(self) -> None:
        pass

    def throttle(self, limit: int | None) -> None:
        self.limits.append(limit)
        self.limit = limit
        self._woken.set()

    async def stop(self) -> None:
        self._stopping = True
        self._woken.set()

    async def close(self) -> None:
        await self.stop()

    async def all_reported(self) -> None:
        async with asyncio.timeout(HANG_S):
            await self._all.wait()


async def forget(delete: bool) -> None:
    pass


async def settled_by(count: int, handler: Handler) -> dict[int, tuple[int, int | None, str]]:
    source = ScriptedSource(count)
    subscriber = Subscriber(source, handler, concurrency=1, forget=forget)
    await subscriber.start()
    await source.all_reported()
    assert not any(worker.done() for worker in subscriber._workers)
    await subscriber.drain()
    return source.settled


async def test_a_cancelled_await_inside_a_handler_releases_the_message() -> None:
    async def handle(message: Message) -> None:
        if message.offset == 0:
            waiting = asyncio.ensure_future(asyncio.sleep(HANG_S))
            waiting.cancel()
            await waiting

    settled = await settled_by(3, handle)
    assert settled == {
        0: (Verb.RELEASE, None, "CancelledError: CancelledError"),
        1: (Verb.ACCEPT, None, ""),
        2: (Verb.ACCEPT, None, ""),
    }


@pytest.mark.parametrize("when", ["at once", "later", "without waiting", "and goes on"])
async def test_a_handler_that_cancels_its_own_task_has_failed(when: str) -> None:
    async def handle(message: Message) -> None:
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
        if message.offset == 0:
            asyncio.get_running_loop().call_soon(task.cancel) if when == "later" else task.cancel()
            if when == "and goes on":
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.sleep(HANG_S)
            elif when != "without waiting":
                await asyncio.sleep(HANG_S)
        await asyncio.sleep(0) if message.offset else None

    settled = await settled_by(3, handle)
    is_done = when in ("without waiting", "and goes on")
    assert settled == {
        0: (Verb.ACCEPT, None, "") if is_done else (Verb.RELEASE, None, "CancelledError: CancelledError"),
        1: (Verb.ACCEPT, None, ""),
        2: (Verb.ACCEPT, None, ""),
    }


def test_a_handler_does_not_block_the_end_of_the_program() -> None:
    sources: list[ScriptedSource] = []

    async def handle(message: Message) -> None:
        await asyncio.sleep(HANG_S)

    async def main() -> None:
        sources.append(ScriptedSource(1))
        await Subscriber(sources[0], handle, concurrency=1, forget=forget).start()
        await until(lambda: not sources[0].messages)

    asyncio.run(main())
    assert sources[0].settled == {0: (Verb.RELEASE, 0, "the worker was stopped")}


@pytest.mark.parametrize("is_plain", [False, True])
async def test_a_base_exception_is_a_handler_error(is_plain: bool) -> None:
    def fail(message: Message) -> None:
        if message.offset == 0:
            pytest.fail("one euro is missing")

    async def handle(message: Message) -> None:
        fail(message)

    assert await settled_by(2, fail if is_plain else handle) == {
        0: (Verb.RELEASE, None, "Failed: one euro is missing"),
        1: (Verb.ACCEPT, None, ""),
    }


async def test_a_stopped_worker_releases_its_message() -> None:
    source, begun = ScriptedSource(1), asyncio.Event()

    async def handle(message: Message) -> None:
        begun.set()
        await asyncio.sleep(HANG_S)

    subscriber = Subscriber(source, handle, concurrency=1, forget=forget)
    await subscriber.start()
    await begun.wait()
    await subscriber.drain(timeout=0)
    assert source.settled == {0: (Verb.RELEASE, 0, "the worker was stopped")}


@pytest.mark.parametrize("seconds", [math.inf, math.nan, "5", 1e300, None])
async def test_an_invalid_retry_delay_is_a_handler_error(seconds: Any) -> None:
    with pytest.raises(InvalidRequest, match="not a number of seconds"):
        RetryLater(seconds)
    nack: Any = ScriptedSource(1).messages[0].nack
    with pytest.raises(InvalidRequest, match="not a number of seconds"):
        await nack(delay=seconds or math.inf)

    async def handle(message: Message) -> None:
        if message.offset == 0:
            raise RetryLater(seconds)

    settled = await settled_by(2, handle)
    assert settled[0][:2] == (Verb.RELEASE, None)
    assert settled[1][0] == Verb.ACCEPT


async def test_an_error_whose_str_fails_releases_the_message() -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    async def handle(message: Message) -> None:
        raise (UnprintableError, Reject, RetryLater)[message.offset](
            *((), ("half \ud800",), (2.5, "soon"))[message.offset]
        )

    assert await settled_by(3, handle) == {
        0: (Verb.RELEASE, None, ""),
        1: (Verb.REJECT, None, "half ?"),
        2: (Verb.RELEASE, 2500, "soon"),
    }


@pytest.mark.parametrize("is_idempotent", [False, True])
async def test_plain_functions_run_up_to_the_concurrency_limit(is_idempotent: bool, tmp_path: Path) -> None:
    count = 40
    together = threading.Barrier(count)

    def handle(message: Message) -> None:
        together.wait(HANG_S)

    idempotent = IdempotentHandler(handle, name="h", store=str(tmp_path / "handled.db")) if is_idempotent else None
    source = ScriptedSource(count)
    subscriber = Subscriber(source, idempotent or handle, concurrency=count, forget=forget)
    await subscriber.start()
    await source.all_reported()
    await subscriber.drain()
    if idempotent is not None:
        await idempotent.close()
    assert source.settled == dict.fromkeys(range(count), (Verb.ACCEPT, None, ""))


# -- a handler that fails for everything -------------------------------------------------------------------------


def verbs(source: ScriptedSource) -> list[int]:
    return [source.settled[offset][0] for offset in sorted(source.settled)]


async def test_a_handler_that_always_fails_is_given_one_message_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S_MIN", 0.01)
    monkeypatch.setattr(module, "PAUSE_S_MAX", 0.02)
    source, has_succeeded = ScriptedSource(30), False

    async def handle(message: Message) -> None:
        nonlocal has_succeeded
        has_succeeded = has_succeeded or len(source.limits) > 7
        if not has_succeeded:
            raise ConnectionError("the database is down")

    subscriber = Subscriber(source, handle, concurrency=1, forget=forget)
    await subscriber.start()
    await source.all_reported()
    await subscriber.drain()
    # All messages are released, then one at a time is tried until one succeeds.
    assert source.limits[:9] == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert source.limits[9:] == [None, None, None]
    # These tries do not count as deliveries.
    assert verbs(source) == [Verb.RELEASE] * 10 + [Verb.RETURN] * 3 + [Verb.ACCEPT] * 17


async def test_a_tried_message_goes_behind_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad messages at the front of a queue do not starve the good ones behind them."""
    monkeypatch.setattr(module, "PAUSE_S_MIN", 0.001)
    monkeypatch.setattr(module, "PAUSE_S_MAX", 0.001)
    bad, source = 60, ScriptedSource(80)

    async def handle(message: Message) -> None:
        if message.offset < bad:
            raise ValueError("this cannot be read")

    subscriber = Subscriber(source, handle, concurrency=1, forget=forget)
    await subscriber.start()
    await source.all_reported()
    await subscriber.drain()
    assert verbs(source) == [Verb.RELEASE] * 10 + [Verb.RETURN] * 50 + [Verb.ACCEPT] * 20
    delays = [source.settled[offset][1] or 0 for offset in range(10, bad)]
    assert delays == sorted(delays)
    assert delays[0] >= 1
    # One is tried after the first pause, and one more after each further pause.
    assert source.limits.count(1) == 51


async def test_failures_count_as_attempts_after_a_day_without_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S_MIN", 0.001)
    monkeypatch.setattr(module, "PAUSE_S_MAX", 0.001)
    monkeypatch.setattr(module, "OUTAGE_S_MAX", 0.0)
    source = ScriptedSource(20)

    async def handle(message: Message) -> None:
        raise ValueError("this cannot be read")

    subscriber = Subscriber(source, handle, concurrency=1, forget=forget)
    await subscriber.start()
    await source.all_reported()
    await subscriber.drain()
    assert verbs(source) == [Verb.RELEASE] * 20
    assert all(source.settled[offset][1] for offset in range(10, 20))


async def test_a_few_failing_messages_use_up_their_attempts() -> None:
    """The messages may be at fault, so their subscription's attempt limit applies."""
    source, again = ScriptedSource(module.FAILED_MESSAGES_MAX - 1), 3
    all_of_them = list(source.messages)

    async def handle(message: Message) -> None:
        nonlocal again
        if not source.messages and again:
            again -= 1
            source.settled.clear()
            source.messages += all_of_them
        raise ValueError("this cannot be read")

    subscriber = Subscriber(source, handle, concurrency=1, forget=forget)
    await subscriber.start()
    await source.all_reported()
    await subscriber.drain()
    assert (again, verbs(source)) == (0, [Verb.RELEASE] * len(all_of_them))


async def test_a_failure_while_nothing_succeeds_is_not_counted_as_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S_MIN", HANG_S)
    source, gate = ScriptedSource(20), asyncio.Event()

    async def handle(message: Message) -> None:
        await gate.wait()
        raise ConnectionError("the database is down")

    subscriber = Subscriber(source, handle, concurrency=20, forget=forget)
    await subscriber.start()
    await until(lambda: not source.messages)
    gate.set()
    await source.all_reported()
    assert verbs(source) == [Verb.RELEASE] * 10 + [Verb.RETURN] * 10
    # The end of the pause is not awaited.
    async with asyncio.timeout(HANG_S / 2):
        await subscriber.drain()


@pytest.mark.parametrize("case", ["one message", "sometimes", "by intent"])
async def test_a_handler_that_fails_for_some_messages_keeps_its_concurrency(case: str) -> None:
    async def handle(message: Message) -> None:
        if case == "one message":
            raise ValueError("this one cannot be read")
        if case == "by intent":
            raise RetryLater(1) if message.offset % 2 else Reject("no")
        if message.offset % 10 != 9:
            raise ValueError("most cannot be read")

    source = ScriptedSource(60)
    if case == "one message":
        source.messages = source.messages[:1] * 60
    subscriber = Subscriber(source, handle, concurrency=1, forget=forget)
    await subscriber.start()
    await until(lambda: not source.messages)
    assert source.limits == []
    await subscriber.drain()


async def test_failures_of_one_kind_are_logged_once_and_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handle(message: Message) -> None:
        if message.offset % 2:
            raise ValueError(f"{message.offset} cannot be read")
        if message.offset % 4 == 0:
            raise KeyError(message.offset)

    await settled_by(12, handle)
    output = [(record.getMessage(), record.exc_info is not None) for record in caplog.records]
    assert [is_traceback for _, is_traceback in output] == [True, True, False]
    assert output[-1][0] == "the handler of 'billing' failed 7 more times, not logged"
    caplog.clear()
    log = module.FailureLog("billing")
    message = ScriptedSource(1).messages[0]
    for _ in range(3):
        log.failed(message, ValueError())
    monkeypatch.setattr(module, "LOGGED_EVERY_S", 0.0)
    log.failed(message, ValueError())
    assert caplog.records[-1].getMessage().endswith("(and 2 times before, not logged)")
