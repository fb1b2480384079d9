"""The faults of the programs of a trial: each kind is drawn from a seed as timed steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple

from millstream_testing.trial_worker import TrialWorker


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
