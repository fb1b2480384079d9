"""Start `millstream` processes without importing it again: a process that has imported everything forks them.

Imports take most of the CPU time of a start, and a full test run starts hundreds of servers, each with a gateway. A
forked process is as real as any other: it has its own memory, files, signals and process group, and can be killed. What
differs is the name in the list of processes, that a signal cannot arrive while it imports, and that the forking process
is the parent of both a server and its gateway.

The forking process is started with the first request and ends with the process that asked for it.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, NoReturn

from millstream.broker.security import sasl
from millstream.protocol.messages.lean_kio import import_lean_kio

FIRST_RESPONSE_S_MAX: Final = 120.0
GATEWAY: Final = "millstream.gateway.process"
_REQUEST_BYTES_MAX: Final = 1 << 18
_FILES_MAX: Final = 16
_FREE_DESCRIPTOR: Final = 500
"""Descriptors from here on are unused while a new process arranges its own."""
_REPORT: Final = struct.Struct("=q")
"""The report about a process: its id, and later its exit status."""
_IMPORTED: Final = (
    "millstream.cli.app",
    "millstream.cli.serve",
    "millstream.broker.node",
    "millstream.broker.kafka.served_apis",
    "millstream.child_processes",
    GATEWAY,
)


class ForkedProcess:
    """A forked process, with the subset of `subprocess.Popen` that its users need."""

    def __init__(self, pid: int, stdout: IO[bytes], reports: int) -> None:
        self.pid = pid
        self.stdout: IO[bytes] | None = stdout
        self.returncode: int | None = None
        self._reports = reports
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; that of a signal is negative."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self._look(0.5 if deadline is None else max(0.0, deadline - time.monotonic()))) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("millstream", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, wait_s: float) -> int | None:
        with self._lock:
            if self.returncode is None and select.select([self._reports], [], [], wait_s)[0]:
                self.returncode = _exit_code(self._reports)
                os.close(self._reports)
            return self.returncode


class ForkedChild:
    """A forked gateway, with the subset of `asyncio.subprocess.Process` that its supervisor needs."""

    def __init__(self, pid: int, reports: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._reports = reports
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(reports, self._end)

    async def wait(self) -> int | None:
        """Wait for the end and return the exit code."""
        await self._ended.wait()
        return self.returncode

    def kill(self) -> None:
        """Kill the process; raises `ProcessLookupError` if it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, signal.SIGKILL)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._reports)
        self.returncode = _exit_code(self._reports)
        os.close(self._reports)
        self._ended.set()


def _exit_code(reports: int) -> int:
    """Read the exit status; if there is none, the forking process has ended, and its children with it."""
    report = os.read(reports, _REPORT.size)
    return os.waitstatus_to_exitcode(_REPORT.unpack(report)[0] if report else int(signal.SIGKILL))


class _ForkServer:
    """The client's side: sends requests to the forking process, which it starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._owner = 0

    def fork(
        self,
        arguments: Sequence[str],
        *,
        log: IO[bytes],
        cwd: Path,
        environment: Mapping[str, str],
        stdin: int | None = None,
    ) -> ForkedProcess:
        request = {"arguments": list(arguments), "cwd": str(cwd), "environment": dict(environment)}
        output, output_end = os.pipe()
        with open(os.devnull, "rb") as nothing:
            files = [nothing.fileno() if stdin is None else stdin, output_end, log.fileno()]
            try:
                with self._lock:
                    pid, reports = _ask(self._connected(), request, files)
            finally:
                os.close(output_end)
        return ForkedProcess(pid, os.fdopen(output, "rb", buffering=0), reports)

    def _connected(self) -> socket.socket:
        if self._socket is None or self._owner != os.getpid():
            here, there = _socket_pair()
            with there:
                process = subprocess.Popen([sys.executable, "-m", __name__], stdin=there.fileno())
            atexit.register(_end, here, process)
            self._socket, self._owner = here, os.getpid()
        return self._socket


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_BYTES_MAX)
    return here, there


def _ask(asks: socket.socket, request: Mapping[str, object], files: Sequence[int]) -> tuple[int, int]:
    """Fork a process with these files; return its id, and where its exit status will be reported."""
    reports, reports_end = os.pipe()
    try:
        socket.send_fds(asks, [json.dumps(request).encode()], [reports_end, *files])
    finally:
        os.close(reports_end)
    if not select.select([reports], [], [], FIRST_RESPONSE_S_MAX)[0] or not (pid := os.read(reports, _REPORT.size)):
        os.close(reports)
        raise RuntimeError("the process that forks servers is gone, or too slow to respond")
    return _REPORT.unpack(pid)[0], reports


def _end(asks: socket.socket, process: subprocess.Popen[bytes]) -> None:
    asks.close()
    process.wait(FIRST_RESPONSE_S_MAX)


_server = _ForkServer()
fork = _server.fork


# -- the forking process -------------------------------------------------------------------------------------


class _Forking:
    """The forking process: servers request their gateways from it, and tests their servers."""

    def __init__(self, tests: socket.socket) -> None:
        self._tests = tests
        self._gateways, self._of_servers = _socket_pair()
        self._ended, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._running: dict[int, int] = {}

    def serve(self) -> None:
        """Fork processes on request until the tests are over."""
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which end what they started.
        awaited: list[socket.socket | int] = [self._tests, self._of_servers, self._ended]
        while True:
            ready, _, _ = select.select(awaited, [], [])
            if self._ended in ready:
                os.read(self._ended, 4096)
                self._report_ended()
            for asks in (self._tests, self._of_servers):
                if asks in ready and not self._fork(asks):
                    return

    def _fork(self, asks: socket.socket) -> bool:
        request, files, _, _ = socket.recv_fds(asks, _REQUEST_BYTES_MAX, _FILES_MAX)
        if not request:
            return False
        reports, *others = files
        pid = os.fork()
        if not pid:
            self._become(json.loads(request), reports, others)
        if asks is self._tests:
            with suppress(PermissionError, ProcessLookupError):  # The child does the same; the first of the two counts.
                os.setpgid(pid, pid)
        _report(reports, pid)
        self._running[pid] = reports
        for file in others:
            os.close(file)
        return True

    def _report_ended(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            reports = self._running.pop(pid)
            _report(reports, status)
            os.close(reports)

    def _become(self, request: dict[str, Any], reports: int, files: list[int]) -> NoReturn:
        """Turn the forked process into the requested one."""
        code = 70
        try:
            signal.set_wakeup_fd(-1)
            for other in (self._ended, self._wake, reports, *self._running.values()):
                os.close(other)
            self._tests.close()
            self._of_servers.close()
            is_gateway = "descriptors" in request
            if is_gateway:
                self._gateways.close()
                os.setsid()
            else:
                os.setpgid(0, 0)
                _fork_gateways(self._gateways)
            _place(files, [0, 1, 2, *request.get("descriptors", ())])
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.chdir(request["cwd"])
            os.environ.clear()
            os.environ.update(request["environment"])
            sys.argv = ["millstream", *request["arguments"]]
            code = _run(is_gateway)
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)


def _report(reports: int, value: int) -> None:
    with suppress(BrokenPipeError):  # The requester may have ended: servers are killed while they start.
        os.write(reports, _REPORT.pack(value))


def _place(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Move files to the descriptors with these numbers."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, _FREE_DESCRIPTOR) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _run(is_gateway: bool) -> int:
    run: Callable[[], object]
    if is_gateway:
        run = importlib.import_module(GATEWAY).main
    else:
        from millstream.cli.main import run
    try:
        run()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def _fork_gateways(asks: socket.socket) -> None:
    """Fork the gateways of this process, a server; its other children are started as usual."""
    start = asyncio.create_subprocess_exec

    async def start_or_fork(program: str, *arguments: str, **options: Any) -> Any:
        if arguments[:2] != ("-m", GATEWAY):
            return await start(program, *arguments, **options)
        environment = options["env"]
        request = {
            "arguments": arguments[2:],
            "cwd": os.getcwd(),
            "environment": dict(os.environ if environment is None else environment),
            "descriptors": options["pass_fds"],
        }
        return ForkedChild(*_ask(asks, request, [options["stdin"], 2, 2, *options["pass_fds"]]))

    asyncio.create_subprocess_exec = start_or_fork  # type: ignore[assignment]


def _serve() -> None:
    import_lean_kio()
    for name in _IMPORTED:
        importlib.import_module(name)
    # All tests have the same address: each failed authentication would delay the next one longer, up to seconds.
    sasl._PAUSE_S_MAX = sasl._PAUSE_S_FIRST
    _Forking(socket.socket(fileno=os.dup(0))).serve()


if __name__ == "__main__":
    _serve()
