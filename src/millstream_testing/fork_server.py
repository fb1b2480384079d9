"""Start `millstream` processes without importing it again: a process that has imported everything forks them.

Imports are most of the CPU time of a start, and a run of all tests starts hundreds of servers. A forked process is as
real as any other: it has its own memory, files, signals and process group, and can be killed. What differs is the name
in the list of processes, and that a signal cannot arrive while it imports.

The forking process is started with the first request and ends with the process that asked for it.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

FIRST_ANSWER_S_MAX: Final = 120.0
_REQUEST_BYTES_MAX: Final = 1 << 18
_FILES: Final = 3  # The output, the log, and where the process id and the exit status are reported.
_IMPORTED: Final = (
    "millstream.cli.app",
    "millstream.cli.serve",
    "millstream.broker.node",
    "millstream.broker.kafka.served_apis",
    "millstream.child_processes",
)


class ForkedProcess:
    """A forked process, with the part of `subprocess.Popen` that its users need."""

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
        """Kill the process."""
        self.send_signal(signal.SIGKILL)

    def _look(self, wait_s: float) -> int | None:
        with self._lock:
            if self.returncode is None and select.select([self._reports], [], [], wait_s)[0]:
                self.returncode = os.waitstatus_to_exitcode(int(os.read(self._reports, 64) or signal.SIGKILL))
                os.close(self._reports)
            return self.returncode


class _ForkServer:
    """The client's side: asks the forking process, which it starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._owner = 0

    def fork(
        self, arguments: Sequence[str], *, log: IO[bytes], cwd: Path, environment: Mapping[str, str]
    ) -> ForkedProcess:
        request = json.dumps({"arguments": list(arguments), "cwd": str(cwd), "environment": dict(environment)})
        output, output_end = os.pipe()
        reports, reports_end = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._connected(), [request.encode()], [output_end, log.fileno(), reports_end])
        finally:
            os.close(output_end)
            os.close(reports_end)
        if not select.select([reports], [], [], FIRST_ANSWER_S_MAX)[0] or not (pid := os.read(reports, 64)):
            raise RuntimeError("the process that forks servers is gone, or too slow to answer")
        return ForkedProcess(int(pid), os.fdopen(output, "rb", buffering=0), reports)

    def _connected(self) -> socket.socket:
        if self._socket is None or self._owner != os.getpid():
            here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with there:
                process = subprocess.Popen([sys.executable, "-m", __name__], stdin=there.fileno())
            atexit.register(_end, here, process)
            here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_BYTES_MAX)
            self._socket, self._owner = here, os.getpid()
        return self._socket


def _end(asks: socket.socket, process: subprocess.Popen[bytes]) -> None:
    asks.close()
    process.wait(FIRST_ANSWER_S_MAX)


_server = _ForkServer()
fork = _server.fork


# -- the forking process -------------------------------------------------------------------------------------


def _serve() -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    asks = socket.socket(fileno=os.dup(0))
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which end what they started.
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([asks.fileno(), ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            _report_ended(running)
        if asks.fileno() in ready:
            request, files, _, _ = socket.recv_fds(asks, _REQUEST_BYTES_MAX, _FILES)
            if not request:
                return
            output, log, reports = files
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                for other in (asks.fileno(), ended, wake, *running.values()):
                    os.close(other)
                _become(json.loads(request), output, log, reports)
            with suppress(PermissionError, ProcessLookupError):  # The child does the same; the first of the two counts.
                os.setpgid(pid, pid)
            os.write(reports, str(pid).encode())
            running[pid] = reports
            os.close(output)
            os.close(log)


def _report_ended(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        reports = running.pop(pid)
        with suppress(BrokenPipeError):  # The one who asked may have ended.
            os.write(reports, str(status).encode())
        os.close(reports)


def _become(request: dict[str, object], output: int, log: int, reports: int) -> None:
    """Turn the forked process into `millstream` with the arguments of the request; does not return."""
    code = 70
    try:
        os.setpgid(0, 0)
        os.close(reports)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for file, number in ((nothing, 0), (output, 1), (log, 2)):
            os.dup2(file, number)
            os.close(file)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.chdir(str(request["cwd"]))
        os.environ.clear()
        os.environ.update(request["environment"])  # type: ignore[call-overload]
        sys.argv = ["millstream", *request["arguments"]]  # type: ignore[misc]
        from millstream.cli.main import run

        try:
            run()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve()
