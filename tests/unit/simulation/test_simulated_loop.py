"""The event loop of the simulation: virtual time, seeded scheduling, processes that pause and die."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from millstream_testing.simulation.loop import Deadlock, Runaway, SimulatedLoop, current_process


@pytest.fixture
def loop() -> Iterator[SimulatedLoop]:
    loop = SimulatedLoop(Random(1), steps_max=10_000)
    yield loop
    loop.shut_down()


def test_time_jumps_to_the_next_timer(loop: SimulatedLoop) -> None:
    async def sleep() -> float:
        begin = loop.time()
        await asyncio.sleep(3600)
        return loop.time() - begin

    begin = time.monotonic()
    assert loop.run_until_complete(sleep()) == pytest.approx(3600)
    assert time.monotonic() - begin < 60


def test_a_timeout_and_a_thread_work_as_usual(loop: SimulatedLoop) -> None:
    order: list[int] = []

    async def work() -> str:
        with ThreadPoolExecutor(max_workers=1) as thread:
            await asyncio.gather(*(loop.run_in_executor(thread, order.append, number) for number in range(20)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.sleep(2)
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return await asyncio.to_thread("done".upper)

    assert loop.run_until_complete(work()) == "DONE"
    assert order == list(range(20))


def test_a_process_runs_in_order_and_the_seed_decides_between_processes() -> None:
    def run(seed: int) -> list[tuple[str, int]]:
        seen: list[tuple[str, int]] = []
        loop = SimulatedLoop(Random(seed))

        async def count() -> None:
            for number in range(10):
                seen.append((current_process().name, number))
                await asyncio.sleep(0)

        async def both() -> None:
            await asyncio.gather(*(loop.spawn(loop.start_process(name), count()) for name in "ab"))

        loop.run_until_complete(both())
        loop.shut_down()
        return seen

    runs = [run(seed) for seed in range(10)]
    assert runs == [run(seed) for seed in range(10)]
    assert len({tuple(run) for run in runs}) > 5
    assert all([number for name, number in run if name == "a"] == list(range(10)) for run in runs)


def test_a_killed_process_stops_running_and_a_paused_one_runs_later(loop: SimulatedLoop) -> None:
    seen: list[str] = []

    async def tick() -> None:
        try:
            for _ in range(3):
                await asyncio.sleep(1)
                seen.append(f"{current_process().name} {loop.time():.1f}")
        finally:
            seen.append(f"{current_process().name} ended")

    async def steer() -> list[str]:
        killed, paused = loop.start_process("killed"), loop.start_process("paused")
        for process in (killed, paused):
            loop.spawn(process, tick())
        await asyncio.sleep(1.5)
        loop.kill(killed)
        loop.pause(paused)
        await asyncio.sleep(10)
        loop.resume(paused)
        await asyncio.sleep(10)
        return list(seen)

    reported = loop.run_until_complete(steer())
    assert sorted(reported[:2]) == ["killed 1001.0", "paused 1001.0"]
    assert reported[2:] == ["paused 1011.5", "paused 1012.5", "paused ended"]


def test_no_work_is_a_deadlock_and_endless_work_a_runaway(loop: SimulatedLoop) -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Deadlock, match="wait"):
        loop.run_until_complete(wait())
    with pytest.raises(Runaway):
        loop.run_until_complete(spin())
