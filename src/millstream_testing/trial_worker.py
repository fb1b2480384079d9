"""The programs of a trial: processes that are killed, paused and duplicated, and continue in a new life."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from millstream_testing.transaction_events import Event, decode
from millstream_testing.transaction_worker import RENEW, STUCK
from millstream_testing.trial_clients import TrialFailed

STOP_S_MAX = 60.0
TRANSACTIONS = "millstream_testing.transaction_program"
_LOG_TAIL_BYTES = 1500


class Task(Protocol):
    """The task of one life of a program."""

    @property
    def producer(self) -> str:
        """Its name, unique to each life."""

    @property
    def file(self) -> str:
        """The file of its journal."""


class Life:
    """One process, and its journal."""

    def __init__(self, task: Task, folder: Path, program: str = TRANSACTIONS) -> None:
        self.task = task
        self._file = Path(task.file)
        self._file.touch()
        self._read = 0
        given = folder / f"{task.producer}.task"
        given.write_bytes(msgspec.json.encode(task))
        self.log = folder / f"{task.producer}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", program, str(given)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    @property
    def is_running(self) -> bool:
        """Whether the process is running."""
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_S_MAX)

    def pause(self) -> None:
        """Pause it without its knowledge."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume it, unless it has ended."""
        self.process.send_signal(signal.SIGCONT)

    def lines(self) -> Iterator[bytes]:
        """Return what it recorded since the last time, without a line that was unfinished when it was killed."""
        with self._file.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                yield line

    def log_tail(self) -> str:
        """Return the end of its output."""
        return self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")


class TrialWorker:
    """The place of a program, with one life after the other."""

    def __init__(self, name: str, folder: Path, new_task: Callable[[str], Task], program: str = TRANSACTIONS) -> None:
        self.name = name
        self._folder = folder
        self._new_task = new_task
        self._program = program
        self.lives: list[Life] = []
        self._replaced: list[Life] = []
        self.renewed = 0
        """How often a worker ended on its own: replaced by another one with its name, or after an error."""

    @property
    def life(self) -> Life:
        """The newest life."""
        return self.lives[-1]

    def start(self) -> None:
        """Start a life; one that still runs has to notice that it was replaced."""
        if self.lives and self.life.is_running:
            self._replaced.append(self.life)
        self.lives.append(Life(self._new_task(f"{self.name}.{len(self.lives)}"), self._folder, self._program))

    def kill(self) -> None:
        """Kill the newest life."""
        self.life.kill()

    def pause(self) -> None:
        """Pause the newest life."""
        self.life.pause()

    def resume(self) -> None:
        """Resume the newest life."""
        self.life.resume()

    def stop(self) -> None:
        """Let the newest life end between two transactions."""
        self.life.process.terminate()

    def tend(self) -> None:
        """Restart a worker that ended on its own; raise `TrialFailed` for one that is stuck or broken."""
        for life in [*self._replaced, self.life]:
            code = self._ended(life)
            if code is None:
                continue
            if life in self._replaced:
                self.renewed += 1
                self._replaced.remove(life)
            elif code != -signal.SIGKILL:
                self.renewed += code == RENEW
                self.start()

    def finish(self) -> None:
        """Stop for good."""
        self.stop()
        for life in [*self._replaced, self.life]:
            try:
                life.process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                raise TrialFailed(f"{life.task.producer} did not stop:\n{life.log_tail()}") from None
            self._ended(life)

    def _ended(self, life: Life) -> int | None:
        code = life.process.poll()
        # One that has just started does not handle the signal yet.
        if code not in {None, 0, RENEW, -signal.SIGKILL, -signal.SIGTERM}:
            how = "is stuck" if code == STUCK else f"exited with code {code}"
            raise TrialFailed(f"{life.task.producer} {how}:\n{life.log_tail()}")
        return code

    @property
    def replaced(self) -> list[str]:
        """Return lives that were replaced and have not noticed it."""
        return [life.task.producer for life in self._replaced]

    def end(self) -> None:
        """Kill all lives."""
        for life in self.lives:
            if life.is_running:
                life.kill()

    def lines(self) -> Iterator[bytes]:
        """Return what all lives recorded since the last time."""
        for life in self.lives:
            yield from life.lines()

    def events(self) -> Iterator[Event]:
        """The same, for programs with transactions."""
        yield from map(decode, self.lines())
