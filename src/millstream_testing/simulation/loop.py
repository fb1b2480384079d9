"""A deterministic event loop: virtual time, no sockets, no threads, and an order that a seed decides.

Time stands still while anything can run, and then advances to the next timer. Work for a thread runs inline after a
random delay, in order for each executor. Within a process, callbacks run in the order of `call_soon`, as asyncio
guarantees; the seed decides which process runs next, and which of two simultaneous timers fires first.

Everything that runs in a simulation belongs to a process, which can be paused, resumed and killed: a node, a client,
the coordination store. It is found by its context: tasks, timers and callbacks inherit the context in which they were
made, so that the code under test is unaware of it.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
from asyncio import events
from bisect import insort
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextvars import Context, ContextVar, copy_context
from random import Random
from typing import Any, TypeVar

_TASKS_MIN = 32


class Process:
    """A process. Its callbacks run in the order of scheduling; between processes there is no order."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.alive = True
        self.paused = False
        self.ready: deque[asyncio.Handle] = deque()
        self.context: Context = copy_context()
        self.context.run(PROCESS.set, self)
        self.generators: list[AsyncGenerator[Any, Any]] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._tasks_max = _TASKS_MIN

    def __repr__(self) -> str:
        return f"Process({self.name})"

    @property
    def runs(self) -> bool:
        """Whether its callbacks may be called now."""
        return self.alive and not self.paused

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Keep a reference to a task, so that its `finally` does not run after the process has died."""
        tasks = self._tasks
        tasks.append(task)
        if len(tasks) > self._tasks_max:
            self._tasks = [task for task in tasks if not task.done()]
            self._tasks_max = max(_TASKS_MIN, 2 * len(self._tasks))

    def pending_tasks(self) -> list[asyncio.Task[Any]]:
        return [task for task in self._tasks if not task.done()]


PROCESS: ContextVar[Process] = ContextVar("PROCESS")


def current_process() -> Process:
    return PROCESS.get()


T = TypeVar("T")

STEPS_MAX = 2_000_000
STEPS_AT_ONCE_MAX = 50_000
THREAD_DELAY_MAX_S = 0.004
THREAD_SLOW_CHANCE = 0.02
THREAD_SLOW_MAX_S = 0.5
_START_S = 1000.0
_SHUTDOWN_STEPS_MAX = 20_000


class Deadlock(Exception):
    """Nothing can run, no timer is set, and the awaited result has not happened."""


class Runaway(Exception):
    """More steps than any run should need."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """The event loop of a simulation. `world` is the process of everything that is not simulated itself."""

    def __init__(self, rng: Random, *, steps_max: int = STEPS_MAX) -> None:
        super().__init__()
        self.world = Process("world", 0)
        self.steps = 0
        self.after_step: Callable[[Process], None] | None = None
        """Called after every callback, outside of it, with the process that ran: what it raises ends the run."""
        self.unhandled_errors: list[dict[str, Any]] = []
        """Errors of tasks and callbacks that were not awaited."""
        self._rng = rng
        self._draw = rng.random
        self._steps_max = steps_max
        self._steps_here = 0
        self._now = _START_S
        self._runnable: list[Process] = []
        self._timers: list[tuple[float, float, int, asyncio.TimerHandle, Process]] = []
        self._timer_number = 0
        self._task_number = 0
        self._processes: list[Process] = [self.world]
        self._shutting_down = False
        self._executor_free: dict[int, tuple[Executor, float]] = {}

    # -- the asyncio interface --------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Call after everything that the process has scheduled before."""
        if context is None:
            context = copy_context()
        handle = asyncio.Handle(callback, args, self, context)
        self._enqueue(context.get(PROCESS, self.world), handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Call a little later, as when the loop notices the result of a thread."""
        return self.call_at(self._now + self._thread_delay_s(), callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + max(0.0, delay), callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if context is None:
            context = copy_context()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._timer_number += 1
        process = context.get(PROCESS, self.world)
        heapq.heappush(self._timers, (when, self._draw(), self._timer_number, handle, process))
        return handle

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        """Start a task in the running process, or in the one whose context is given."""
        if context is None:
            context = copy_context()
        self._task_number += 1
        task: asyncio.Task[T] = _NumberedTask(self._task_number, coro, loop=self, name=name, context=context)
        context.get(PROCESS, self.world).keep(task)
        if self._shutting_down:
            task.cancel()
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run the function inline after a delay, and report its result after another delay."""
        future: asyncio.Future[T] = self.create_future()
        begin = self._now + self._thread_delay_s()
        if executor is not None:
            begin = max(begin, self._executor_free.get(id(executor), (executor, 0.0))[1])
        end = begin + self._thread_delay_s()
        if executor is not None:
            # The executor is kept, so that no other one gets its number.
            self._executor_free[id(executor)] = (executor, end + 1e-9)
        self.call_at(begin, self._work, future, end, func, args)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Record an error that was not awaited."""
        self.unhandled_errors.append(context)

    def _thread_delay_s(self) -> float:
        if self._draw() < THREAD_SLOW_CHANCE:
            return self._draw() * THREAD_SLOW_MAX_S
        return 1e-6 + self._draw() * THREAD_DELAY_MAX_S

    def _work(self, future: asyncio.Future[T], end: float, func: Callable[..., T], args: tuple[Any, ...]) -> None:
        try:
            outcome = func(*args)
        except Exception as error:
            self.call_at(end, _fail, future, error)
        else:
            self.call_at(end, _settle, future, outcome)

    # -- processes --------------------------------------------------------------------------------------------

    def start_process(self, name: str) -> Process:
        """Create a process, in which nothing runs yet."""
        process = Process(name, len(self._processes))
        self._processes.append(process)
        return process

    def spawn(self, process: Process, coro: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        return self.create_task(coro, name=name, context=process.context.copy())

    def kill(self, process: Process) -> None:
        """End a process immediately: none of its code runs any more, not even `finally`."""
        process.alive = False
        self._leave(process)

    def pause(self, process: Process) -> None:
        """Pause a process; time continues without it."""
        process.paused = True
        self._leave(process)

    def resume(self, process: Process) -> None:
        process.paused = False
        if process.alive and process.ready:
            self._join(process)

    def _join(self, process: Process) -> None:
        # By number, so that the seed alone decides the order.
        if process not in self._runnable:
            insort(self._runnable, process, key=_number_of)

    def _leave(self, process: Process) -> None:
        if process in self._runnable:
            self._runnable.remove(process)

    def _enqueue(self, process: Process, handle: asyncio.Handle) -> None:
        # Callbacks of a dead process are kept until the end, so that its tasks can be cancelled then.
        ready = process.ready
        if not ready and process.alive and not process.paused:
            self._join(process)
        ready.append(handle)

    # -- running ----------------------------------------------------------------------------------------------

    def run_until_complete(self, future: Any) -> Any:
        """Run until the future or coroutine is done; raise `Deadlock` or `Runaway` if that is impossible."""
        with _Running(self):
            main = future if isinstance(future, asyncio.Future) else self.spawn(self.world, future)
            while not main.done():
                process = self._step()
                if self.after_step is not None:
                    self.after_step(process)
            return main.result()

    def _step(self) -> Process:
        """Call one callback; return its process."""
        runnable = self._runnable
        while not runnable:
            self._jump()
        self.steps += 1
        self._steps_here += 1
        if self.steps > self._steps_max or self._steps_here > STEPS_AT_ONCE_MAX:
            raise Runaway(f"{self.steps} steps, {self._steps_here} of them at the moment {self._now:.6f}")
        at = int(self._draw() * len(runnable)) if len(runnable) > 1 else 0
        process = runnable[at]
        handle = process.ready.popleft()
        if not process.ready:
            del runnable[at]
        if not handle.cancelled():
            handle._run()
        return process

    def _jump(self) -> None:
        """Run the next timers."""
        timers = self._timers
        while timers and (timers[0][3].cancelled() or not timers[0][4].alive):
            heapq.heappop(timers)
        if not timers:
            waiting = [str(task) for process in self._processes if process.alive for task in process.pending_tasks()]
            raise Deadlock(f"nothing to do at {self._now:.6f}; waiting: " + "; ".join(waiting[:20]))
        when = timers[0][0]
        if when > self._now:
            self._now = when
            self._steps_here = 0
        while timers and timers[0][0] <= self._now:
            _, _, _, handle, process = heapq.heappop(timers)
            if not handle.cancelled():
                self._enqueue(process, handle)

    def shut_down(self) -> None:
        """Cancel all tasks, including those of dead processes, and close the loop."""
        self.after_step = None
        self._steps_max = self.steps + _SHUTDOWN_STEPS_MAX * 2
        with _Running(self):
            for process in self._processes:
                process.alive, process.paused = True, False
                if process.ready:
                    self._join(process)
                for task in process.pending_tasks():
                    task.cancel()
            # Cancelled tasks may start new ones, which must not be left behind.
            self._shutting_down = True
            self._drain()
            self._shutting_down = False
            for process in self._processes:
                for generator in process.generators:
                    self.create_task(_close(generator))
            self._drain()
        self._timers.clear()
        self.close()

    def _drain(self) -> None:
        """Run what is ready, without advancing the time."""
        for _ in range(_SHUTDOWN_STEPS_MAX):
            if not self._runnable:
                return
            self._steps_here = 0
            self._step()


class _NumberedTask(asyncio.Task[T]):
    """A task whose hash does not depend on its memory address, since asyncio keeps tasks in sets."""

    def __init__(self, number: int, *args: Any, **kwargs: Any) -> None:
        self._number = number
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class _Running:
    """Make this the running loop, and keep references to the async generators of its processes."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self._hooks = sys.get_asyncgen_hooks()

    def __enter__(self) -> None:
        events._set_running_loop(self._loop)
        sys.set_asyncgen_hooks(firstiter=self._begun)

    def __exit__(self, *_: object) -> None:
        sys.set_asyncgen_hooks(*self._hooks)
        events._set_running_loop(None)

    def _begun(self, generator: AsyncGenerator[Any, Any]) -> None:
        PROCESS.get(self._loop.world).generators.append(generator)


def _number_of(process: Process) -> int:
    return process.number


def _settle(future: asyncio.Future[T], outcome: T) -> None:
    if not future.done():
        future.set_result(outcome)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


async def _close(generator: AsyncGenerator[Any, Any]) -> None:
    try:
        await generator.aclose()
    except RuntimeError:
        # It is running inside a task that did not end.
        return


_BEGIN_MS = 1_700_000_000_000


class SimulatedClock:
    """Follows the loop; `jump_ms` moves its wall clock only."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self._ahead_ms = 0

    def now_ms(self) -> int:
        """Wall-clock milliseconds since 1970."""
        return _BEGIN_MS + self._ahead_ms + int(self._loop.time() * 1000)

    def monotonic(self) -> float:
        return self._loop.time()

    def jump_ms(self, milliseconds: int) -> None:
        """Move the wall clock, forward or back."""
        self._ahead_ms += milliseconds
