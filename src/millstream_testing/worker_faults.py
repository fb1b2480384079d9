"""The faults of the programs of a trial: each kind is drawn from a seed as timed steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple

from millstream_testing.trial_worker import TrialWorker


class Step(NamedTuple):
    """A step at a moment, in seconds from the beginning of the fault."""

    at_s: float
    do: Callable[[], object]


class WorkerFault(NamedTuple):
    """A fault of one program."""

    what: str
    kills: int
    steps: list[Step]


def kill(worker: TrialWorker, random: Random) -> WorkerFault:
    """Killed, and another life begins at once or a while later."""
    away_s = random.choice([0.0, random.uniform(0.0, 1.0), random.uniform(1.0, 7.0)])
    steps = [Step(0.0, worker.kill), Step(away_s, worker.start)]
    return WorkerFault(f"{worker.name} killed, away for {away_s:.1f} s", 1, steps)


def kill_soon(worker: TrialWorker, random: Random) -> WorkerFault:
    """Killed, and the next life killed while it begins."""
    second_s = random.uniform(0.2, 1.5)
    steps = [Step(0.0, worker.kill), Step(0.0, worker.start), Step(second_s, worker.kill), Step(second_s, worker.start)]
    return WorkerFault(f"{worker.name} killed, and again after {second_s:.1f} s", 2, steps)


def pause(worker: TrialWorker, random: Random) -> WorkerFault:
    """It is paused, maybe so long that its group and its coordinator drop it, and resumes unaware of that."""
    away_s = random.choice([random.uniform(0.5, 3.0), random.uniform(6.0, 14.0)])
    steps = [Step(0.0, worker.pause), Step(away_s, worker.resume)]
    return WorkerFault(f"{worker.name} paused for {away_s:.1f} s", 0, steps)


def double(worker: TrialWorker, random: Random) -> WorkerFault:
    """Another one with its name starts while it runs, after a pause or without one."""
    if random.random() < _HALF:
        return WorkerFault(f"{worker.name} doubled", 0, [Step(0.0, worker.start)])
    away_s = random.uniform(1.0, 6.0)
    old = worker.life
    steps = [Step(0.0, old.pause), Step(away_s / 2, worker.start), Step(away_s, old.resume)]
    return WorkerFault(f"{worker.name} doubled while it was paused for {away_s:.1f} s", 0, steps)


def stop(worker: TrialWorker, random: Random) -> WorkerFault:
    """Stop a worker cleanly, and restart it."""
    return WorkerFault(f"{worker.name} stopped", 0, [Step(0.0, worker.stop)])


Draw = Callable[[TrialWorker, Random], WorkerFault]

WORKER_KINDS: Mapping[str, tuple[Draw, int]] = {
    "worker-kill": (kill, 7),
    "worker-kill-soon": (kill_soon, 2),
    "worker-pause": (pause, 2),
    "worker-double": (double, 2),
    "worker-stop": (stop, 1),
}
"""Every kind, with its weight."""

_HALF = 0.5
