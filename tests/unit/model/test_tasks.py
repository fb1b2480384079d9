"""Concurrent work: results, which failure is raised, and that no cancellation is lost."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from millstream.core.tasks import TaskSupervisor, gather_or_cancel, keep_running, run_until_first, within

HANG_S = 60.0


async def _given(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def _fails(error: Exception) -> int:
    await asyncio.sleep(0)
    raise error


async def test_results_are_in_order_and_no_work_gives_none() -> None:
    assert await gather_or_cancel(_given(number) for number in range(5)) == [0, 1, 2, 3, 4]
    assert await gather_or_cancel([]) == []


async def test_a_failure_cancels_the_others_and_is_raised_unchanged() -> None:
    never = asyncio.Event()
    cleaned = []

    async def waits() -> int:
        try:
            await never.wait()
        finally:
            cleaned.append("waits")
        return 0

    with pytest.raises(KeyError, match="gone"):
        await gather_or_cancel([waits(), _fails(KeyError("gone")), waits()])
    assert cleaned == ["waits", "waits"]


async def test_the_first_result_cancels_the_others() -> None:
    never = asyncio.Event()
    await run_until_first([never.wait(), _given(1)])
    with pytest.raises(OSError, match="away"):
        await run_until_first([never.wait(), _fails(OSError("away"))])


async def test_a_cancellation_during_the_clean_up_after_a_failure_is_not_lost() -> None:
    leaves = asyncio.Event()
    may_leave = asyncio.Event()

    async def is_slow_to_leave() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            leaves.set()
            await may_leave.wait()
            raise
        return 0

    async def whole() -> None:
        while True:
            try:
                await gather_or_cancel([is_slow_to_leave(), _fails(OSError("away"))])
            except OSError:
                continue

    task = asyncio.create_task(whole())
    await leaves.wait()
    task.cancel()
    may_leave.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)


async def test_the_first_task_that_fails_is_reported() -> None:
    supervisor = TaskSupervisor()

    async def end() -> None:
        return

    async def die() -> None:
        raise ValueError("broken")

    await supervisor.start("short", end())
    assert not supervisor.failed.done()
    await asyncio.wait([supervisor.start("mill", die())])
    with pytest.raises(RuntimeError, match="mill: broken"):
        await supervisor.failed


async def test_a_supervisor_cancels_its_tasks() -> None:
    supervisor = TaskSupervisor()
    task = supervisor.start("waiting", asyncio.Event().wait())  # type: ignore[arg-type]
    await supervisor.close()
    assert task.cancelled()
    assert not supervisor.failed.done()


async def test_work_that_ends_or_fails_is_restarted() -> None:
    runs = 0
    running = asyncio.Event()

    async def run() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise ValueError("a defect")
        if runs == 3:
            running.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(keep_running("work", run, pause_s=0))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert runs == 3


# -- timeouts ----------------------------------------------------------------------------------------------------


async def test_a_cancellation_together_with_the_result_is_not_lost() -> None:
    event, rounds = asyncio.Event(), 0

    async def wait_repeatedly() -> None:
        nonlocal rounds
        while rounds < 3:
            with suppress(TimeoutError):
                await within(HANG_S, event.wait())
            rounds += 1

    task = asyncio.ensure_future(wait_repeatedly())
    await asyncio.sleep(0)
    event.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rounds == 0


async def test_work_that_takes_too_long_is_cancelled() -> None:
    is_cancelled = False

    async def work() -> None:
        nonlocal is_cancelled
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            is_cancelled = True
            raise

    with pytest.raises(TimeoutError):
        await within(0.001, work())
    assert is_cancelled
    assert await within(None, asyncio.sleep(0, "done")) == "done"
