from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar

import pytest

from millstream.client.loop_thread import LoopThread
from millstream.core.errors import InvalidRequest
from millstream_testing.child_process import child_process

context_value: ContextVar[str] = ContextVar("context_value", default="nothing")


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    opened = LoopThread()
    yield opened
    opened.close()


async def seen() -> str:
    return context_value.get()


def test_calls_run_in_the_thread_with_the_context_of_the_caller(thread: LoopThread) -> None:
    token = context_value.set("this")
    assert thread.call(seen()) == "this"
    context_value.reset(token)
    assert thread.call(seen()) == "nothing"


async def fail() -> None:
    raise ValueError("no")


def test_errors_are_raised_in_the_caller(thread: LoopThread) -> None:
    with pytest.raises(ValueError, match="no"):
        thread.call(fail())


async def numbers(closed: list[str]) -> AsyncIterator[int]:
    try:
        for number in range(3):
            yield number
    finally:
        closed.append("closed")


def test_iterators_end_and_are_closed(thread: LoopThread) -> None:
    closed: list[str] = []
    assert list(thread.each(numbers(closed))) == [0, 1, 2]
    for number in thread.each(numbers(closed)):
        assert number == 0
        break
    assert closed == ["closed", "closed"]


def test_a_call_from_the_loop_thread_is_refused(thread: LoopThread) -> None:
    async def inside() -> None:
        thread.call(seen())

    with pytest.raises(InvalidRequest, match="deadlock"):
        thread.call(inside())


def test_a_call_after_close_is_refused() -> None:
    thread = LoopThread()
    thread.close()
    thread.close()
    with pytest.raises(InvalidRequest, match="closed"):
        thread.call(seen())


def test_closing_something_after_the_client_does_nothing() -> None:
    thread = LoopThread()
    thread.close()
    thread.finish(lambda: pytest.fail("it was closed with the client"))


def test_several_threads_may_call(thread: LoopThread) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(thread.call(seen()))) for _ in range(10)]
    for worker in threads:
        worker.start()
    for worker in threads:
        worker.join()
    assert found == ["nothing"] * 10


async def test_it_works_beside_a_running_loop(thread: LoopThread) -> None:
    assert await asyncio.to_thread(thread.call, seen()) == "nothing"


PROGRAM = """
import asyncio
from millstream.client.loop_thread import LoopThread

async def work():
    print("began", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("cancelled", flush=True)

thread = LoopThread()
try:
    thread.call(work())
except KeyboardInterrupt:
    thread.close()
    print("interrupted", flush=True)
"""


def test_an_interrupt_cancels_the_call() -> None:
    with child_process([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "began\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "cancelled\ninterrupted\n"
    assert process.returncode == 0
