"""The broker that `millstream demo` runs: a process of its own on free ports, with a folder that goes when it goes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

from millstream.cli.exit_code import CommandFailed
from millstream.cli.held_port import HeldPort
from millstream.core.config import ENVIRONMENT_PREFIX

READY_S_MAX = 30.0
STOP_S_MAX = 30.0
_LOG_LINES_SHOWN = 20


class DemoBroker:
    """Use it as a context manager: whatever happens, process and folder are gone afterwards."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="millstream-demo-"))
        self.data = self.folder / "data"
        self._held = (HeldPort(), HeldPort())
        self.kafka, self.http = (port.address for port in self._held)
        self.start_s = 0.0
        self._log = self.folder / "broker.log"
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._running().pid

    async def start(self) -> None:
        """Start and wait until it is ready; every start takes the same ports."""
        began = time.monotonic()
        command = [sys.executable, "-m", "millstream.cli.main", "serve", "--json", "--data", str(self.data)]
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                "--kafka",
                self.kafka,
                "--http",
                self.http,
                # The webhook of the demo is on this machine.
                "--push-private-addresses",
                "true",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=self.folder,
                env={name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)},
                # Ctrl-C in the terminal is for the demo, which then stops the broker in order.
                process_group=0,
            )
        ready = json.loads(await self._first_line(self._process))
        self.kafka, self.http = ready["kafka"], ready["http"]
        self.start_s = time.monotonic() - began

    async def stop(self) -> int:
        """Ask it to stop cleanly and return its exit code."""
        process = self._running()
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S_MAX):
                code = await process.wait()
        except TimeoutError:
            raise CommandFailed(f"the broker did not stop within {STOP_S_MAX:g} s{self._log_tail()}") from None
        await self.kill()
        return code

    async def kill(self) -> None:
        """Kill it and its children as `kill -9` does, if it runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
            self._process = None

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise CommandFailed(f"the broker is not running{self._log_tail()}")
        return self._process

    async def _first_line(self, process: asyncio.subprocess.Process) -> bytes:
        if process.stdout is None:
            raise CommandFailed("the broker was started without a pipe to it")
        try:
            async with asyncio.timeout(READY_S_MAX):
                line = await process.stdout.readline()
        except TimeoutError:
            raise CommandFailed(f"the broker was not ready within {READY_S_MAX:g} s{self._log_tail()}") from None
        if not line:
            raise CommandFailed(f"the broker ended with exit code {await process.wait()}{self._log_tail()}")
        return line

    def _log_tail(self) -> str:
        if not self._log.exists():
            return ""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
        return "; its log ends with:\n" + "\n".join(lines)
