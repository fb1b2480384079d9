"""Child processes of the broker: start one, restart it when it exits, stop it in order, and exchange messages with it.

A child runs as long as its standard input is open. Only the broker holds the other end, so the child also ends when the
broker is killed. A message to or from a child that responds to requests is its length in four bytes, then its body.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from abc import ABC, abstractmethod
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import msgspec

from millstream.core.backoff import Backoff
from millstream.core.tasks import within

_logger = logging.getLogger(__name__)

T = TypeVar("T")

_SETTING_PREFIXES: Final = ("MILLSTREAM_", "_MILLSTREAM")
_DATABASE_PASSWORD: Final = "PGPASSWORD"

BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 10.0
SETTLED_S = 30.0
"""A child that ran for this long was healthy: if it dies, the backoff starts again from the shortest delay."""

KILLS_MAX = 10
"""How often to search for processes that were started while their session was being killed."""

LENGTH_BYTES = 4
MESSAGE_BYTES_MAX = 1 << 30

STOP_S = 5.0
"""How long a child may take to finish its work before it is killed."""


class SupervisedChild(ABC):
    """Keep one process running."""

    name = "a child process"
    """The name of the child in the broker's log."""

    def __init__(self, *, backoff_min_s: float = BACKOFF_MIN_S) -> None:
        self._backoff_min_s = backoff_min_s
        self._process: Process | None = None
        self._spawned = asyncio.Event()
        self._stopping = asyncio.Event()
        # Whether the running child was asked to end.
        self._is_dismissed = False
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """Return the process id of the running child, if any."""
        return self._process.pid if self._process is not None else None

    @property
    def stop_s(self) -> float:
        return STOP_S

    async def run(self) -> None:
        """Start the child and restart it whenever it exits, until `stop`; runs as a background task of the broker."""
        backoff = Backoff(first_s=self._backoff_min_s, max_s=BACKOFF_MAX_S)
        while not self._stopping.is_set():
            await self._wait_until_needed()
            started = asyncio.get_running_loop().time()
            code = await self._run_once()
            if self._is_dismissed or self._stopping.is_set():
                continue
            if asyncio.get_running_loop().time() - started > SETTLED_S:
                backoff.reset()
            self.restarts += 1
            _logger.warning("%s exited; restarting it", self.name, extra={"code": code, "in_s": backoff.next_s})
            await backoff.pause_unless(self._stopping)

    async def spawned(self) -> None:
        await self._spawned.wait()

    async def stop(self) -> None:
        """Ask the child to finish its work; kill it if it takes too long."""
        self._stopping.set()
        await self._terminate()

    async def _terminate(self) -> None:
        """Ask the running child, if any, to finish its work; kill it if it takes too long."""
        process = self._process
        if process is None:
            return
        self._is_dismissed = True
        self._hang_up()
        try:
            await within(self.stop_s, process.wait())
        except TimeoutError:
            _logger.warning("%s did not stop in time and was killed", self.name, extra={"pid": process.pid})
            self._kill(process)
            await process.wait()

    def _kill(self, process: Process) -> None:
        with suppress(ProcessLookupError):
            process.kill()

    @abstractmethod
    async def _spawn(self) -> Process:
        """Start the process."""

    def _hang_up(self) -> None:
        """Close the child's standard input if it is open."""
        if self._process is not None:
            hang_up(self._process)

    async def _send_commands(self, process: Process, news: asyncio.Event, command: Callable[[], Any]) -> None:
        """Send a command whenever there is news; hang up once it is None, as there is nothing left to do."""
        while (due := command()) is not None:
            news.clear()
            await send_line(process, due)
            await news.wait()
        self._is_dismissed = True
        hang_up(process)

    async def _wait_until_needed(self) -> None:
        """Wait until a child is needed, or until `stop` is called."""
        return

    async def _wait_for_exit(self, process: Process) -> int:
        """Wait for the child to exit; return its exit code."""
        return await process.wait()

    async def _run_once(self) -> int:
        if self._stopping.is_set():
            return 0
        try:
            process = await self._spawn()
        except OSError as error:
            _logger.warning("%s could not be started", self.name, extra={"reason": str(error)})
            return -1
        self._process = process
        self._is_dismissed = False
        self._spawned.set()
        if self._stopping.is_set():
            self._hang_up()
        try:
            return await self._wait_for_exit(process)
        except asyncio.CancelledError:
            # The broker stops waiting, for example because its own start failed.
            self._kill(process)
            await process.wait()
            raise
        finally:
            self._hang_up()
            self._process = None


async def spawn_module(module: str, *arguments: str, **more: Any) -> Process:
    """Start a Python module with pipes, in its own session: Ctrl-C in a terminal then reaches only the broker, which
    stops its children in order.
    """
    options = {"stdin": PIPE, "stdout": PIPE, **more}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, start_new_session=True, **options
    )


def environment_without_settings() -> dict[str, str]:
    """Return the environment without the settings of the node, which may contain passwords."""
    return {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(_SETTING_PREFIXES) and name != _DATABASE_PASSWORD
    }


def hang_up(process: Process) -> None:
    if process.stdin is not None:
        process.stdin.close()


async def send_line(process: Process, message: Any) -> None:
    """Send a message as a JSON line; to a child that has exited, send nothing."""
    if process.stdin is not None:
        with suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(message) + b"\n")
            await process.stdin.drain()


async def read_events(
    process: Process, kind: type[T], *, name: str, read_line: Callable[[], Awaitable[bytes]] | None = None
) -> AsyncIterator[T]:
    """Yield the messages of a child that writes JSON lines; one that cannot be read is logged and left out."""
    stream = process.stdout
    while stream is not None:
        try:
            line = await (stream.readline() if read_line is None else read_line())
            if not line:
                return
            event = msgspec.json.decode(line, type=kind)
        except ValueError as error:
            # Lines that are too long fail too; reading continues after them.
            _logger.warning("a report of %s cannot be read", name, extra={"error": str(error)})
            continue
        yield event


def frame_message(body: bytes) -> bytes:
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


async def exchange(process: Process, request: bytes) -> bytes:
    """Send a framed request to a child and return the body of its response."""
    if process.stdin is None:
        raise RuntimeError("the process was started without pipes")
    process.stdin.write(request)
    await process.stdin.drain()
    return await read_message(process)


async def read_message(process: Process) -> bytes:
    """Return the body of the next message of a child; raise `IncompleteReadError` if it ends."""
    if process.stdout is None:
        raise RuntimeError("the process was started without pipes")
    size = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
    if size > MESSAGE_BYTES_MAX:
        raise ConnectionError(f"a response of {size} bytes is too large")
    return await process.stdout.readexactly(size)


def serve_requests(respond: Callable[[bytes], bytes]) -> None:
    """Respond, in a child, to requests on the standard input one by one, until the broker closes it."""
    while (body := read_framed(sys.stdin.buffer)) is not None:
        sys.stdout.buffer.write(frame_message(respond(body)))
        sys.stdout.buffer.flush()


def read_framed(stream: IO[bytes]) -> bytes | None:
    """Return the body of the next message of a stream; None at its end."""
    head = stream.read(LENGTH_BYTES)
    size = int.from_bytes(head, "big")
    if len(head) < LENGTH_BYTES or size > MESSAGE_BYTES_MAX:
        return None
    body = stream.read(size)
    return body if len(body) == size else None


def processes_of_session(session: int) -> list[tuple[int, int]]:
    """Return the running processes of a session, in all its process groups, with their resident pages."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                processes.append((int(folder.name), int(fields[21])))
    return processes


def memory_of_session(session: int) -> int:
    """Return the resident bytes of the processes of a session."""
    return sum(pages for _, pages in processes_of_session(session)) * os.sysconf("SC_PAGE_SIZE")


def kill_session(session: int, *, except_pid: int = 0) -> None:
    """Kill a process and everything that it has started, such as Java and its Python workers, except `except_pid`.

    They are suspended first, so that none of them reports the end of another.
    """
    for _ in range(KILLS_MAX):
        pids = [pid for pid, _ in processes_of_session(session) if pid != except_pid]
        if not pids:
            return
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
