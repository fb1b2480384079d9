"""Answers that begin with the request: what is ready is answered at once, what waits goes on in a task."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from millstream.broker.net.reply import Buffers, start


async def test_what_waits_for_nothing_is_answered_without_a_turn_of_the_loop() -> None:
    async def answer() -> Buffers:
        return [b"ready"]

    assert start(answer()) == [b"ready"]


async def test_what_waits_goes_on_in_a_task_where_it_stopped() -> None:
    steps: list[str] = []
    futures: list[asyncio.Future[str]] = [asyncio.get_running_loop().create_future() for _ in range(2)]

    async def answer() -> Buffers:
        for future in futures:
            steps.append("waits")
            steps.append(await future)
        async with asyncio.timeout(60):
            await asyncio.sleep(0)
        return [b"late"]

    started = start(answer())
    assert steps == ["waits"]
    # It may be there before the task has taken its first step.
    futures[0].set_result("first")
    task = asyncio.create_task(_coroutine(started))
    await asyncio.sleep(0)
    futures[1].set_result("second")
    assert await task == [b"late"]
    assert steps == ["waits", "first", "waits", "second"]


async def test_an_answer_that_is_given_up_or_refused_hears_of_it() -> None:
    heard: list[BaseException] = []

    async def answer(future: asyncio.Future[None]) -> Buffers:
        try:
            await future
        except BaseException as error:
            heard.append(error)
            raise
        return []

    loop = asyncio.get_running_loop()
    task = asyncio.create_task(_coroutine(start(answer(loop.create_future()))))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    refused: asyncio.Future[None] = loop.create_future()
    task = asyncio.create_task(_coroutine(start(answer(refused))))
    refused.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await task
    assert [type(error) for error in heard] == [asyncio.CancelledError, ValueError]


def _coroutine(started: Buffers | Coroutine[Any, Any, Buffers]) -> Coroutine[Any, Any, Buffers]:
    assert asyncio.iscoroutine(started)
    return started
