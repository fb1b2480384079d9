"""The programs of a trial: processes that are killed, paused, duplicated and restarted."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

import msgspec

from millstream_testing.transaction_history import Event, decode
from millstream_testing.transaction_worker import RESTART, STUCK
from millstream_testing.trial_clients import TrialFailed

STOP_S_MAX = 60.0
TRANSACTIONS = "millstream_testing.transaction_program"
_LOG_TAIL_BYTES = 1500


class Task(Protocol):
    """The task of one process of a program."""

    @property
    def producer(self) -> str:
        """Its name, unique to each process."""

    @property
    def file(self) -> str:
        """The file of its journal."""


class WorkerProcess:
    """A process, and its journal."""

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
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_S_MAX)

    def pause(self) -> None:
        """Stop it with SIGSTOP, which it does not notice."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume it, unless it has ended."""
        self.process.send_signal(signal.SIGCONT)

    def lines(self) -> Iterator[bytes]:
        """Return the lines recorded since the last call, without one that was incomplete when it was killed."""
        with self._file.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                yield line

    def log_tail(self) -> str:
        return self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")


class TrialWorker:
    """A program, as a sequence of processes."""

    def __init__(self, name: str, folder: Path, new_task: Callable[[str], Task], program: str = TRANSACTIONS) -> None:
        self.name = name
        self._folder = folder
        self._new_task = new_task
        self._program = program
        self.processes: list[WorkerProcess] = []
        self._replaced: list[WorkerProcess] = []
        self.restarts = 0
        """How many processes ended on their own: replaced by another one of the same name, or after an error."""

    @property
    def current(self) -> WorkerProcess:
        return self.processes[-1]

    def start(self) -> None:
        """Start a process; one that still runs must notice that it was replaced."""
        if self.processes and self.current.is_running:
            self._replaced.append(self.current)
        self.processes.append(
            WorkerProcess(self._new_task(f"{self.name}.{len(self.processes)}"), self._folder, self._program)
        )

    def kill(self) -> None:
        self.current.kill()

    def pause(self) -> None:
        self.current.pause()

    def resume(self) -> None:
        self.current.resume()

    def stop(self) -> None:
        """Stop the newest process between two transactions."""
        self.current.process.terminate()

    def restart_if_ended(self) -> None:
        """Restart a worker that ended on its own; raise `TrialFailed` for one that is stuck or broken."""
        for worker_process in [*self._replaced, self.current]:
            code = self._ended(worker_process)
            if code is None:
                continue
            if worker_process in self._replaced:
                self.restarts += 1
                self._replaced.remove(worker_process)
            elif code != -signal.SIGKILL:
                self.restarts += code == RESTART
                self.start()

    def finish(self) -> None:
        """Stop, without a restart."""
        self.stop()
        for worker_process in [*self._replaced, self.current]:
            try:
                worker_process.process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                raise TrialFailed(
                    f"{worker_process.task.producer} did not stop:\n{worker_process.log_tail()}"
                ) from None
            self._ended(worker_process)

    def _ended(self, ended: WorkerProcess) -> int | None:
        code = ended.process.poll()
        # A process that has just started does not handle the signal yet.
        if code not in {None, 0, RESTART, -signal.SIGKILL, -signal.SIGTERM}:
            how = "is stuck" if code == STUCK else f"exited with code {code}"
            raise TrialFailed(f"{ended.task.producer} {how}:\n{ended.log_tail()}")
        return code

    @property
    def replaced(self) -> list[str]:
        """Return processes that were replaced and have not ended yet."""
        return [worker_process.task.producer for worker_process in self._replaced]

    def end(self) -> None:
        for process in self.processes:
            if process.is_running:
                process.kill()

    def lines(self) -> Iterator[bytes]:
        """Return the lines that all processes recorded since the last call."""
        for process in self.processes:
            yield from process.lines()

    def events(self) -> Iterator[Event]:
        """Return the decoded lines of a transactional program."""
        yield from map(decode, self.lines())


class Step(NamedTuple):
    """An action at a time, in seconds from the start of the fault."""

    at_s: float
    do: Callable[[], object]


class WorkerFault(NamedTuple):
    what: str
    kills: int
    steps: list[Step]


def kill(worker: TrialWorker, random: Random) -> WorkerFault:
    """Kill a worker, and restart it at once or later."""
    away_s = random.choice([0.0, random.uniform(0.0, 1.0), random.uniform(1.0, 7.0)])
    steps = [Step(0.0, worker.kill), Step(away_s, worker.start)]
    return WorkerFault(f"{worker.name} killed, away for {away_s:.1f} s", 1, steps)


def kill_soon(worker: TrialWorker, random: Random) -> WorkerFault:
    """Kill a worker, restart it, and kill it again while it starts."""
    second_s = random.uniform(0.2, 1.5)
    steps = [Step(0.0, worker.kill), Step(0.0, worker.start), Step(second_s, worker.kill), Step(second_s, worker.start)]
    return WorkerFault(f"{worker.name} killed, and again after {second_s:.1f} s", 2, steps)


def pause(worker: TrialWorker, random: Random) -> WorkerFault:
    """Pause a worker, perhaps until its group and its coordinator have expired it, and resume it."""
    away_s = random.choice([random.uniform(0.5, 3.0), random.uniform(6.0, 14.0)])
    steps = [Step(0.0, worker.pause), Step(away_s, worker.resume)]
    return WorkerFault(f"{worker.name} paused for {away_s:.1f} s", 0, steps)


def duplicate(worker: TrialWorker, random: Random) -> WorkerFault:
    """Start another worker with the same name while it runs or is paused."""
    if random.random() < _HALF:
        return WorkerFault(f"{worker.name} duplicated", 0, [Step(0.0, worker.start)])
    away_s = random.uniform(1.0, 6.0)
    old = worker.current
    steps = [Step(0.0, old.pause), Step(away_s / 2, worker.start), Step(away_s, old.resume)]
    return WorkerFault(f"{worker.name} duplicated while it was paused for {away_s:.1f} s", 0, steps)


def stop(worker: TrialWorker, random: Random) -> WorkerFault:
    """Stop a worker cleanly, and restart it."""
    return WorkerFault(f"{worker.name} stopped", 0, [Step(0.0, worker.stop)])


Draw = Callable[[TrialWorker, Random], WorkerFault]

WORKER_KINDS: Mapping[str, tuple[Draw, int]] = {
    "worker-kill": (kill, 7),
    "worker-kill-soon": (kill_soon, 2),
    "worker-pause": (pause, 2),
    "worker-double": (duplicate, 2),
    "worker-stop": (stop, 1),
}
"""Every kind, with its weight."""

_HALF = 0.5
