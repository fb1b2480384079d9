"""A small pool of child processes that respond to requests: the cost of a hostile request is bounded.

Processes are started on demand and end after a while without work. The numbers of processes and of waiting requests are
limited. A request that takes longer than `USUAL_S_MAX` is killed with its process and restarted in a separate queue, so
that it delays only other slow requests; there it has more time, and is refused when that has passed. Without slow
workers, a request gets all of the time at once. A child sends an empty message once it has started.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from millstream.core.child_process import exchange, frame_message, read_message, serve_requests, spawn_module
from millstream.core.config import LIMIT_VARIABLES
from millstream.core.errors import QuotaExceeded

WORKERS_MAX: Final = 2
SLOW_WORKERS_MAX: Final = 1
WAITING_MAX: Final = 256
SLOW_WAITING_MAX: Final = 16
USUAL_S_MAX: Final = 1.0
"""How long a request may hold up others; one that takes longer waits for a slow worker."""
RESPONSE_S_MAX: Final = 10.0
START_S_MAX: Final = 60.0
IDLE_S: Final = 60.0
"""How long a process without work is kept."""
MEMORY_BYTES_MAX: Final = 1 << 30
_CHILD_RESPONSE_S_MAX: Final = 30.0
_ENVIRONMENT: Final = (
    *("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TZ", "VIRTUAL_ENV"),
    # Where the machine code of the record codec is cached.
    *("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"),
    *LIMIT_VARIABLES,
)


class ChildTimedOut(Exception):
    """A child took too long to respond and was killed."""


class ChildDied(Exception):
    """A child ended without a response, because it ran out of memory."""


class _Worker(NamedTuple):
    process: Process
    folder: str
    """The folder of its temporary files, which a killed process leaves behind."""


class ChildPool:
    """Processes that run one module, which calls `serve_parent`."""

    def __init__(
        self,
        module: str,
        *,
        noun: str,
        response_s: float = RESPONSE_S_MAX,
        idle_s: float = IDLE_S,
        start_s: float = START_S_MAX,
        slow_workers: int = SLOW_WORKERS_MAX,
    ) -> None:
        self._module = module
        self._noun = noun
        self.response_s = response_s
        self._idle_s = idle_s
        self._start_s = start_s
        self._has_slow_workers = slow_workers > 0
        self._usual_s = min(USUAL_S_MAX, response_s) if slow_workers else response_s
        self._turns = asyncio.Semaphore(WORKERS_MAX)
        self._slow_turns = asyncio.Semaphore(slow_workers)
        self._waiting = 0
        self._slow_waiting = 0
        self._busy: list[_Worker] = []
        self._idle: list[tuple[_Worker, asyncio.TimerHandle]] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Return the ids of the running processes."""
        workers = [*self._busy, *(worker for worker, _ in self._idle)]
        return [worker.process.pid for worker in workers if worker.process.returncode is None]

    async def request(self, body: bytes) -> bytes:
        """Return the response of a child; raise `ChildTimedOut` or `ChildDied` without one.

        Without a child that starts, and with too many requests waiting, it is `QuotaExceeded`: the request can be
        repeated later.
        """
        if self._waiting >= WAITING_MAX:
            raise QuotaExceeded(f"{WAITING_MAX} {self._noun} are being examined already; retry later")
        self._waiting += 1
        try:
            async with self._turns:
                return await self._exchange(body, self._usual_s)
        except ChildTimedOut:
            if not self._has_slow_workers:
                raise
        finally:
            self._waiting -= 1
        if self._slow_waiting >= SLOW_WAITING_MAX:
            raise QuotaExceeded(
                f"{SLOW_WAITING_MAX} {self._noun} that take long are being examined already; retry later"
            )
        self._slow_waiting += 1
        try:
            async with self._slow_turns:
                return await self._exchange(body, self.response_s)
        finally:
            self._slow_waiting -= 1

    async def close(self) -> None:
        """End all processes; pending requests fail."""
        self._is_closed = True
        for worker, timer in self._idle:
            timer.cancel()
            self._discard(worker)
        self._idle.clear()
        await asyncio.gather(*map(_kill, tuple(self._busy)), *self._ending)

    async def _exchange(self, body: bytes, limit_s: float) -> bytes:
        worker, is_new = await self._acquire()
        self._busy.append(worker)
        is_done = False
        try:
            if is_new:
                await self._wait_until_started(worker.process)
            async with asyncio.timeout(limit_s):
                response = await exchange(worker.process, frame_message(body))
            is_done = True
        except TimeoutError:
            raise ChildTimedOut from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ChildDied from None
        finally:
            self._busy.remove(worker)
            if is_done and not self._is_closed:
                self._release(worker)
            else:
                self._discard(worker)
        return response

    async def _wait_until_started(self, process: Process) -> None:
        try:
            async with asyncio.timeout(self._start_s):
                await read_message(process)
        except TimeoutError:
            problem = f"did not start within {self._start_s:.0f} s"
        except (asyncio.IncompleteReadError, ConnectionError):
            problem = "ended while it started"
        else:
            return
        raise QuotaExceeded(
            f"the process that examines {self._noun} {problem}; the machine may be overloaded: retry later"
        )

    async def _acquire(self) -> tuple[_Worker, bool]:
        """Return a worker, and whether it is still starting."""
        while self._idle:
            worker, timer = self._idle.pop()
            timer.cancel()
            if worker.process.returncode is None:
                return worker, False
            self._discard(worker)
        folder = tempfile.mkdtemp(prefix="millstream-child-")
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        # Without the secrets that the broker's environment may hold.
        try:
            process = await spawn_module(self._module, folder, env=environment)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise
        return _Worker(process, folder), True

    def _release(self, worker: _Worker) -> None:
        timer = asyncio.get_running_loop().call_later(self._idle_s, self._expire, worker)
        self._idle.append((worker, timer))

    def _expire(self, worker: _Worker) -> None:
        self._idle = [kept for kept in self._idle if kept[0] is not worker]
        self._discard(worker)

    def _discard(self, worker: _Worker) -> None:
        ending = asyncio.ensure_future(_kill(worker))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


async def _kill(worker: _Worker) -> None:
    if worker.process.stdin is not None:
        worker.process.stdin.close()
    with suppress(ProcessLookupError):
        worker.process.kill()
    await worker.process.wait()
    await asyncio.to_thread(shutil.rmtree, worker.folder, ignore_errors=True)


# -- in the child -------------------------------------------------------------------------------------------


def serve_parent(
    respond: Callable[[bytes], bytes],
    *,
    memory_bytes_max: int | None = MEMORY_BYTES_MAX,
    response_s_max: float = _CHILD_RESPONSE_S_MAX,
) -> None:
    """Respond to requests one by one until the broker closes the pipe; then remove the folder for temporary files."""
    # Ctrl-C in a terminal reaches the whole process group; the broker decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if memory_bytes_max is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes_max, memory_bytes_max))
    folder = tempfile.tempdir = sys.argv[1]

    def respond_in_time(body: bytes) -> bytes:
        # Ends this process; a running broker does so earlier.
        signal.setitimer(signal.ITIMER_REAL, response_s_max)
        response = respond(body)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return response

    try:
        sys.stdout.buffer.write(frame_message(b""))
        sys.stdout.buffer.flush()
        serve_requests(respond_in_time)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
