"""Responses that start with the request: complete ones are sent at once, waiting ones continue in a task."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest

from millstream.broker.net import response
from millstream.broker.net.response import Buffers, EncodedResponse, Promise, Started, start


async def continued(started: Buffers | Started | None) -> EncodedResponse | None:
    assert isinstance(started, Started)
    return await started


def test_a_resolved_promise_is_freed_without_the_garbage_collector() -> None:
    class Watched(Promise):
        __slots__ = ("__weakref__",)

    promise, resolved = Watched(), list[Promise]()
    promise.on_resolved = partial(resolved.append, promise)
    promise.resolve([b"ready"])
    assert resolved == [promise]
    freed = weakref.ref(promise)
    resolved.clear()
    gc.disable()
    try:
        del promise
        assert freed() is None
    finally:
        gc.enable()


async def test_a_response_that_waits_for_nothing_is_sent_without_a_loop_turn() -> None:
    async def respond() -> Buffers:
        return [b"ready"]

    assert start(respond()) == [b"ready"]


async def test_a_waiting_response_continues_in_a_task_where_it_stopped() -> None:
    steps: list[str] = []
    futures: list[asyncio.Future[str]] = [asyncio.get_running_loop().create_future() for _ in range(2)]

    async def respond() -> Buffers:
        for future in futures:
            steps.append("waits")
            steps.append(await future)
        async with asyncio.timeout(60):
            await asyncio.sleep(0)
        return [b"late"]

    started = start(respond())
    assert steps == ["waits"]
    # It may be complete before the task has taken its first step.
    futures[0].set_result("first")
    task = asyncio.create_task(continued(started))
    await asyncio.sleep(0)
    futures[1].set_result("second")
    assert await task == [b"late"]
    assert steps == ["waits", "first", "waits", "second"]


async def test_an_abandoned_or_refused_response_is_notified() -> None:
    heard: list[BaseException] = []

    async def respond(future: asyncio.Future[None]) -> Buffers:
        try:
            await future
        except BaseException as error:
            heard.append(error)
            raise
        return []

    loop = asyncio.get_running_loop()
    task = asyncio.create_task(continued(start(respond(loop.create_future()))))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    refused: asyncio.Future[None] = loop.create_future()
    task = asyncio.create_task(continued(start(respond(refused))))
    refused.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await task
    assert [type(error) for error in heard] == [asyncio.CancelledError, ValueError]


async def test_a_response_that_no_task_continues_releases_its_resources() -> None:
    """Its connection may be lost in the loop turn in which the request arrived."""
    given_back: list[str] = []

    async def respond() -> Buffers:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            given_back.append("a lease")
            raise
        return []

    started = start(respond())
    assert isinstance(started, Started)
    started.close()
    started.close()
    assert given_back == ["a lease"]


async def test_a_response_that_only_needs_a_task_continues_with_its_first_step() -> None:
    steps: list[str] = []

    async def respond() -> Buffers:
        steps.append("arrived")
        await asyncio.sleep(0)
        steps.append("arrived" if asyncio.current_task() is None else "in a task")
        return []

    task = asyncio.create_task(continued(start(respond())))
    assert steps == ["arrived"]
    await asyncio.sleep(0)
    assert steps == ["arrived", "in a task"]
    assert await task == []


async def test_steps_of_a_task_are_measured_without_their_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(response, "time", SimpleNamespace(perf_counter=lambda: now))
    waits_for = asyncio.get_running_loop().create_future()

    async def respond() -> Buffers:
        nonlocal now
        now += 1
        with suppress(OSError):
            await waits_for
        now += 10
        await asyncio.sleep(0)
        now += 100
        return [b"done"]

    started = Started(respond())
    task = asyncio.create_task(continued(started))
    await asyncio.sleep(0)
    assert started.spent_s == 1
    now += 1000
    waits_for.set_exception(OSError())
    assert await task == [b"done"]
    assert started.spent_s == 111
