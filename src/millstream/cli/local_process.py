"""A server process on this machine that never outlives this one, and a port reserved for it."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from millstream.cli.exit_code import CommandFailed


class ReservedPort:
    """A port that no other process is given while this object exists.

    Linux lets sockets share an address if all of them allow it and only one listens, as restarted servers do. Until one
    listens, connections are refused.
    """

    def __init__(self) -> None:
        holds = socket.socket()
        holds.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holds.bind(("127.0.0.1", 0))
        self.number = int(holds.getsockname()[1])
        self.address = f"127.0.0.1:{self.number}"
        weakref.finalize(self, holds.close)


_LAUNCHER = Path(__file__).with_name("die_with_parent.py")
_LOG_TAIL_BYTES = 2000
_KILL_S_MAX = 10.0


class LocalServerFailed(CommandFailed):
    """A server on this machine did not start; the message includes the end of its log."""


class LocalProcess:
    """A command with its log file. Start it in the main thread: the command gets its signal when that thread ends."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        ends_by: signal.Signals = signal.SIGTERM,
        account: str = "-",
        environment: Mapping[str, str] | None = None,
        piped: bool = False,
        keep: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.log = log
        self._command = command
        self._ends_by = ends_by
        self._account = account
        self._environment = environment
        self._piped = piped
        self._keep = keep
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stop_requested = False

    @property
    def is_started(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def exit_code(self) -> int | None:
        """Return its exit code; None while it runs or before it is started."""
        return None if self._process is None else self._process.poll()

    def start(self) -> Self:
        launcher = [
            sys.executable,
            "-I",
            "-S",
            str(_LAUNCHER),
            str(os.getpid()),
            str(int(self._ends_by)),
            self._account,
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*launcher, *self._command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if self._piped else log,
                stderr=log,
                env=self._environment,
                pass_fds=self._keep,
                # Ctrl-C in the terminal is for the foreground process alone, which stops the others in order.
                process_group=0,
            )
        return self

    def first_line(self, *, within_s: float) -> bytes:
        """Return the first line that the command prints, which says that it is ready."""
        output = self._running().stdout
        if output is None:
            raise RuntimeError("the process was started without a pipe")
        deadline = time.monotonic() + within_s
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self.failed(f"was not ready after {within_s:g} s")
                piece = os.read(output.fileno(), 4096)
                if not piece:
                    raise self.failed("exited before it was ready")
                line += piece
        return line

    def check_runs(self) -> None:
        if self.exit_code is not None:
            raise self.failed(f"exited with code {self.exit_code}")

    def failed(self, problem: str) -> LocalServerFailed:
        """Build an error with the end of the log."""
        tail = self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace") if self.log.exists() else ""
        return LocalServerFailed(f"{self.name} {problem}; its log {self.log} ends with:\n{tail}")

    def request_stop(self) -> None:
        """Send the signal for a clean stop, once: a second one would make it hurry."""
        if self._process is not None and self._process.poll() is None and not self._is_stop_requested:
            self._is_stop_requested = True
            self._process.send_signal(self._ends_by)

    def stop(self, *, within_s: float) -> int | None:
        """Stop it cleanly, or kill it if that takes too long; return its exit code."""
        if self._process is None:
            return None
        self.request_stop()
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return self._process.returncode

    def wait(self, within_s: float) -> int:
        try:
            return self._running().wait(within_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise self.failed(f"did not exit within {within_s:g} s") from None

    def kill(self) -> None:
        process = self._running()
        process.kill()
        process.wait(_KILL_S_MAX)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._process


def is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
