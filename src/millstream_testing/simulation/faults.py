"""The faults of a simulation, drawn from its seed: what breaks, when, and for how long.

Each seed draws only a few kinds of faults, since some faults mask the bugs that others expose.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Protocol

from millstream_testing.simulation.network import STORE, Network
from millstream_testing.simulation.plan import CRASH

FAULTS_MIN, FAULTS_MAX = 3, 9
BETWEEN_S = 3.0
SHORT_S, LONG_S = 0.05, 12.0
CLOCK_STEP_MAX_MS = 3_600_000
LEADER_CHANCE = 0.4
STARTS_MAX = 3
DIES_AGAIN_CHANCE = 0.25
DIES_AFTER_S = 0.03
"""About how long a node needs to register and be admitted."""

Fault = Callable[[float], Awaitable[None]]


class Machine(Protocol):
    """A node, as the faults see it."""

    name: str
    is_running: bool

    def kill(self) -> None:
        """Kill its process."""

    def crash(self) -> None:
        """Cut the power of its machine."""

    async def stop(self) -> None:
        """Stop it cleanly."""

    def start(self) -> None:
        """Start its process again, unless it is running."""

    def pause(self) -> None:
        """Pause its process."""

    def resume(self) -> None:
        """Resume its process."""

    def step_clock(self, milliseconds: int) -> None:
        """Set its wall clock."""

    def fail_disk(self) -> None:
        """Make the next sync of a segment fail."""


class FaultTarget(Protocol):
    """The target of the faults."""

    network: Network
    machines: Sequence[Machine]

    def record(self, source: str, event: str) -> None:
        """Add a line to the trace."""

    def may_crash(self, machine: Machine) -> bool:
        """Whether a machine may lose its memory now without losing acknowledged data on all nodes."""

    def leading(self) -> Machine | None:
        """Return a node that leads a partition, if any."""

    async def change_min_in_sync(self, minimum: int) -> None:
        """Set the number of replicas of a topic that must be in sync."""

    def pause_store(self) -> None:
        """Stop the coordination store from responding."""

    def resume_store(self) -> None:
        """Resume it, with the requests that have arrived meanwhile."""


class Faults:
    """Draws faults and applies them."""

    def __init__(self, target: FaultTarget, rng: Random, kinds: Sequence[str]) -> None:
        self._target = target
        self._rng = rng
        known: dict[str, Fault] = {
            "kill": self._kill,
            CRASH: self._crash,
            "pause": self._pause,
            "restart": self._restart,
            "cut": self._cut,
            "cut one way": self._cut_one_way,
            "isolate": self._isolate,
            "cut from store": self._cut_from_store,
            "store away": self._store_away,
            "loss": self._loss,
            "lateness": self._lateness,
            "clock": self._clock,
            "disk": self._disk,
            "settings": self._settings,
        }
        self._faults = [known[kind] for kind in kinds]
        self._kinds = kinds

    async def run(self) -> None:
        """Inject faults, some concurrently, and wait until all have ended."""
        self._target.record("faults", "kinds: " + ", ".join(self._kinds))
        async with asyncio.TaskGroup() as happening:
            for _ in range(self._rng.randint(FAULTS_MIN, FAULTS_MAX)):
                await asyncio.sleep(self._rng.expovariate(1 / BETWEEN_S))
                happening.create_task(self._run_one(self._rng.choice(self._faults)))

    async def _run_one(self, fault: Fault) -> None:
        await fault(SHORT_S * (LONG_S / SHORT_S) ** self._rng.random())

    def _record(self, event: str) -> None:
        self._target.record("faults", event)

    def _machine(self) -> Machine:
        """Return a random node, usually a leader, where most faults matter."""
        drawn = self._rng.choice(self._target.machines)
        return (self._target.leading() or drawn) if self._rng.random() < LEADER_CHANCE else drawn

    # -- nodes ------------------------------------------------------------------------------------------------

    async def _kill(self, duration_s: float) -> None:
        machine = self._machine()
        if not machine.is_running:
            return
        self._record(f"kill {machine.name} for {duration_s:.2f} s")
        machine.kill()
        await self._start_later(machine, duration_s)

    async def _crash(self, duration_s: float) -> None:
        machine = self._machine()
        if not machine.is_running or not self._target.may_crash(machine):
            return
        self._record(f"crash {machine.name} for {duration_s:.2f} s")
        machine.crash()
        await self._start_later(machine, duration_s)

    async def _restart(self, duration_s: float) -> None:
        machine = self._machine()
        if not machine.is_running:
            return
        self._record(f"stop {machine.name} for {duration_s:.2f} s")
        await machine.stop()
        await self._start_later(machine, duration_s)

    async def _start_later(self, machine: Machine, duration_s: float) -> None:
        """Restart a node, which sometimes dies during startup."""
        await asyncio.sleep(duration_s)
        for _ in range(STARTS_MAX):
            if machine.is_running:
                return
            self._record(f"start {machine.name}")
            machine.start()
            if self._rng.random() > DIES_AGAIN_CHANCE:
                return
            await asyncio.sleep(self._rng.expovariate(1 / DIES_AFTER_S))
            self._record(f"kill {machine.name} again")
            machine.kill()
        machine.start()

    async def _pause(self, duration_s: float) -> None:
        machine = self._machine()
        if not machine.is_running:
            return
        self._record(f"pause {machine.name} for {duration_s:.2f} s")
        machine.pause()
        await asyncio.sleep(duration_s)
        self._record(f"resume {machine.name}")
        machine.resume()

    async def _clock(self, _duration_s: float) -> None:
        machine = self._machine()
        step_ms = self._rng.randint(-CLOCK_STEP_MAX_MS, CLOCK_STEP_MAX_MS // 2)
        self._record(f"the clock of {machine.name} goes {step_ms} ms")
        machine.step_clock(step_ms)

    async def _disk(self, _duration_s: float) -> None:
        machine = self._machine()
        self._record(f"the next sync on {machine.name} fails")
        machine.fail_disk()

    async def _settings(self, _duration_s: float) -> None:
        minimum = self._rng.randint(1, 3)
        self._record(f"min.insync.replicas becomes {minimum}")
        await self._target.change_min_in_sync(minimum)

    # -- links ------------------------------------------------------------------------------------------------

    async def _cut(self, duration_s: float) -> None:
        one, other = self._rng.sample(self._target.machines, 2)
        await self._without(duration_s, [(one.name, other.name), (other.name, one.name)])

    async def _cut_one_way(self, duration_s: float) -> None:
        one, other = self._rng.sample(self._target.machines, 2)
        await self._without(duration_s, [(one.name, other.name)])

    async def _isolate(self, duration_s: float) -> None:
        alone = self._machine().name
        others = [STORE, *(machine.name for machine in self._target.machines if machine.name != alone)]
        await self._without(duration_s, [pair for other in others for pair in ((alone, other), (other, alone))])

    async def _cut_from_store(self, duration_s: float) -> None:
        name = self._machine().name
        links = [[(name, STORE), (STORE, name)], [(name, STORE)], [(STORE, name)]]
        await self._without(duration_s, self._rng.choice(links))

    async def _without(self, duration_s: float, links: list[tuple[str, str]]) -> None:
        network = self._target.network
        self._record(f"cut {', '.join(f'{source} to {target}' for source, target in links)} for {duration_s:.2f} s")
        for link in links:
            network.cut(*link)
        await asyncio.sleep(duration_s)
        self._record(f"heal {', '.join(f'{source} to {target}' for source, target in links)}")
        for link in links:
            network.heal(*link)

    async def _loss(self, duration_s: float) -> None:
        network = self._target.network
        network.loss_chance = self._rng.choice((0.02, 0.1, 0.3))
        self._record(f"lose {network.loss_chance:.0%} of everything for {duration_s:.2f} s")
        await asyncio.sleep(duration_s)
        network.loss_chance = 0.0

    async def _lateness(self, duration_s: float) -> None:
        network = self._target.network
        network.late_chance = self._rng.choice((0.02, 0.1, 0.3))
        self._record(f"{network.late_chance:.0%} of everything comes late for {duration_s:.2f} s")
        await asyncio.sleep(duration_s)
        network.late_chance = 0.0

    async def _store_away(self, duration_s: float) -> None:
        self._record(f"the store does not respond for {duration_s:.2f} s")
        self._target.pause_store()
        await asyncio.sleep(duration_s)
        self._record("the store is back")
        self._target.resume_store()
