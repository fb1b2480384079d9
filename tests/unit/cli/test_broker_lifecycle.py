"""The states of a machine's broker processes: arbitrary events, and whole machines whose brokers die and hang."""

from __future__ import annotations

import asyncio
import itertools
from asyncio.subprocess import Process
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.cluster.machine_folder import Layout
from millstream.cli.broker_lifecycle import HELD, WITH_PROCESS, BrokerEvent, BrokerLifecycle, BrokerState
from millstream.cli.machine import FAILED_STARTS_MAX, BrokerProcess, Machine
from millstream.core.config import Config
from millstream.core.errors import ClusterMismatch
from millstream.core.ids import NodeId
from millstream_testing.simulation.loop import SimulatedLoop

ENDS = (BrokerEvent.EXITED, BrokerEvent.SPAWN_FAILED)
events = st.lists(st.sampled_from(BrokerEvent), max_size=60)


class Observed:
    """A lifecycle, and the actual state of its process."""

    def __init__(self) -> None:
        self.lifecycle = BrokerLifecycle(FAILED_STARTS_MAX)
        self.has_process = False
        self.failures = 0
        self.is_retired = False

    @property
    def state(self) -> BrokerState:
        return self.lifecycle.state

    def apply(self, event: BrokerEvent) -> None:
        before = self.state
        if event in ENDS and not self.has_process:
            return
        self.lifecycle.apply(event)
        if event in ENDS:
            self.has_process = False
            self.failures += event is BrokerEvent.EXITED and before is BrokerState.STARTING
        elif event is BrokerEvent.SPAWN:
            self.has_process |= before is BrokerState.DUE
        elif before is not self.state and event in (BrokerEvent.READY, BrokerEvent.RESUME, BrokerEvent.RETRY):
            self.failures = 0
        self.is_retired |= event is BrokerEvent.RETIRE

    def end_process(self) -> None:
        self.apply(BrokerEvent.EXITED)


@given(events)
def test_the_state_tells_whether_a_process_exists_and_why_none_is_started(given_events: list[BrokerEvent]) -> None:
    observed = Observed()
    for event in given_events:
        observed.apply(event)
        assert (observed.state in WITH_PROCESS) is observed.has_process
        assert (observed.state in (BrokerState.RETIRING, BrokerState.RETIRED)) is observed.is_retired
        if observed.state is BrokerState.LOST:
            assert observed.failures == FAILED_STARTS_MAX
        else:
            assert observed.failures < FAILED_STARTS_MAX or observed.is_retired


@given(events, events)
def test_a_paused_broker_is_held_once_its_process_has_ended(
    before: list[BrokerEvent], meanwhile: list[BrokerEvent]
) -> None:
    observed = Observed()
    for event in [*before, BrokerEvent.PAUSE]:
        observed.apply(event)
    observed.end_process()
    assert observed.state in HELD
    for event in meanwhile:
        if event not in (BrokerEvent.RESUME, BrokerEvent.RETRY):
            observed.apply(event)
    assert observed.state in HELD


@given(events)
def test_any_broker_that_is_not_retired_can_be_started_again(given_events: list[BrokerEvent]) -> None:
    observed = Observed()
    for event in given_events:
        observed.apply(event)
    observed.end_process()
    for event in (BrokerEvent.RESUME, BrokerEvent.RETRY):
        observed.apply(event)
    assert observed.state is (BrokerState.RETIRED if observed.is_retired else BrokerState.DUE)


async def test_all_waiters_for_a_state_are_woken() -> None:
    lifecycle = BrokerLifecycle(FAILED_STARTS_MAX)
    waiting = [asyncio.create_task(lifecycle.until(HELD)) for _ in range(3)]
    await asyncio.sleep(0)
    for event in (BrokerEvent.SPAWN, BrokerEvent.PAUSE, BrokerEvent.EXITED):
        assert not any(task.done() for task in waiting)
        lifecycle.apply(event)
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)


# -- whole machines -----------------------------------------------------------------------------------------------

ANNOUNCED = b'{"kafka": "127.0.0.1:1", "listeners": ["127.0.0.1:1"], "internal": "127.0.0.1:2"}\n'
HEALTHY = b'{"reasons": [], "warnings": []}\n'
CALM_S = 400.0
READY_S_MAX = 5.0


class Input:
    """The standard input of a simulated process."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process
        self._is_closed = False

    def write(self, _: bytes) -> None:
        self._process.ask()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._process.hang_up()

    def is_closing(self) -> bool:
        return self._is_closed


class SimulatedProcess:
    """A process that randomly fails to start, dies, or ignores requests."""

    def __init__(self, pid: int, rng: Random, *, starts: bool, is_calm: bool, dies_after_s: float) -> None:
        self._rng = rng
        self.pid = pid
        self.is_deaf = not is_calm and rng.random() < 0.2
        self._responds_after_s = 0.5 if is_calm else 2.0
        self.stdin = Input(self)
        self.stdout = asyncio.StreamReader()
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        ready_s = rng.uniform(0.1, READY_S_MAX)
        if not starts:
            loop.call_later(ready_s, self.exit, 1)
            return
        loop.call_later(ready_s, self._say, ANNOUNCED)
        if not is_calm and rng.random() < 0.7:
            loop.call_later(rng.uniform(dies_after_s, 60), self.exit, -9)

    def ask(self) -> None:
        if not self.is_deaf:
            asyncio.get_running_loop().call_later(self._rng.uniform(0, self._responds_after_s), self._say, HEALTHY)

    def hang_up(self) -> None:
        if not self.is_deaf:
            asyncio.get_running_loop().call_later(self._rng.uniform(0, 10), self.exit, 0)

    def kill(self) -> None:
        self.exit(-9)

    def exit(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code
            self.stdout.feed_eof()
            self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        return cast("int", self.returncode)

    def _say(self, line: bytes) -> None:
        if self.returncode is None:
            self.stdout.feed_data(line)


class SimulatedBroker(BrokerProcess):
    """A broker with simulated processes; some brokers eventually cannot be started any more."""

    def __init__(self, machine: SimulatedMachine, config: Config) -> None:
        super().__init__(machine, config)
        self._rng = machine.rng
        self._pids = machine.pids
        self.process: SimulatedProcess | None = None
        self.is_broken = False
        self.is_calm = False

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def _spawn(self) -> Process:
        assert not self.runs
        await asyncio.sleep(self._rng.uniform(0, 1))
        if not self.is_calm and self.ready.done() and self._rng.random() < 0.05:
            self._lifecycle.apply(BrokerEvent.SPAWN_FAILED)
            raise OSError("no memory for another process")
        starts = not self.is_broken and (self.is_calm or not self.ready.done() or self._rng.random() < 0.9)
        # A machine whose first start fails does not start at all.
        self.process = SimulatedProcess(
            next(self._pids),
            self._rng,
            starts=starts,
            is_calm=self.is_calm,
            dies_after_s=0.0 if self.ready.done() else READY_S_MAX,
        )
        process = cast("Process", self.process)
        self._listening = asyncio.create_task(self._listen(process))
        return process


class SimulatedMachine(Machine):
    """A machine that moves no files, and checks that no process runs while it would."""

    def __init__(self, config: Config, rng: Random) -> None:
        super().__init__(config)
        self.rng = rng
        self.pids = itertools.count(1)
        self.service = object()
        self.moves = 0
        self.refused_share = 0.1
        self.all = [SimulatedBroker(self, self._broker_config(node)) for node in self._layout.nodes]
        self.brokers = list(self.all)

    async def _check_moves(self, layout: Layout) -> None:
        if self.rng.random() < self.refused_share:
            raise ClusterMismatch("a partition is being moved")

    async def _close_logs(self, node: NodeId) -> None:
        await asyncio.sleep(self.rng.uniform(0, 5))
        if self.rng.random() < 0.2:
            raise OSError("the logs cannot be read")

    async def _move_logs(self) -> None:
        self.moves += 1
        for _ in range(5):
            assert not any(broker.runs for broker in self.all), "files are moved while a broker runs"
            await asyncio.sleep(self.rng.uniform(0, 2))

    async def check_health_forever(self) -> None:
        while True:
            await self._refresh_health()
            self._health()
            await asyncio.sleep(self.rng.uniform(0, 3))


@pytest.mark.parametrize("seed", range(60))
def test_a_machine_survives_random_deaths_hangs_and_handovers(seed: int, tmp_path: Path) -> None:
    rng = Random(seed)
    loop = SimulatedLoop(Random(seed + 1))
    try:
        loop.run_until_complete(_live(tmp_path, rng))
        assert not loop.unhandled_errors
    finally:
        loop.shut_down()


async def _live(folder: Path, rng: Random) -> None:
    machine = SimulatedMachine(Config(data=str(folder), cores=str(rng.randint(1, 4))), rng)
    for broker in machine.all:
        machine._running.start(broker.name, broker.run())
    await asyncio.gather(*(broker.ready for broker in machine.all))
    asking = asyncio.create_task(machine.check_health_forever())
    broken = rng.sample(machine.all, rng.randint(0, len(machine.all)))
    for broker in broken:
        await asyncio.sleep(rng.uniform(0, 60))
        broker.is_broken = True
    await asyncio.sleep(rng.uniform(0, 300))
    if rng.random() < 0.7:
        await _calm_down(machine)
    asking.cancel()
    await machine._stop()
    assert not machine.failed.done()
    assert not any(broker.runs for broker in machine.all)
    assert all(broker.state is BrokerState.RETIRED for broker in machine.all)


async def _calm_down(machine: SimulatedMachine) -> None:
    """Stop injecting faults: every broker that has kept its logs serves again."""
    for broker in machine.all:
        broker.is_calm, broker.is_broken = True, False
        if broker.process is not None:
            broker.process.exit(-9)
    await asyncio.sleep(CALM_S)
    states = {broker.node_id: broker.state for broker in machine.all}
    node_ids = {broker.node_id for broker in machine.brokers}
    assert node_ids
    assert len(machine.all) - len(node_ids) == machine.moves
    for node, state in states.items():
        assert state is (BrokerState.SERVING if node in node_ids else BrokerState.RETIRED), states


def test_brokers_lost_at_the_same_time_all_hand_over_their_logs(tmp_path: Path) -> None:
    async def live() -> Any:
        machine = SimulatedMachine(Config(data=str(tmp_path), cores="4"), Random(1))
        for broker in machine.all:
            broker.is_calm = True
            machine._running.start(broker.name, broker.run())
        await asyncio.gather(*(broker.ready for broker in machine.all))
        for broker in machine.all[:2]:
            broker.is_broken = True
            assert broker.process is not None
            broker.process.exit(-9)
        await asyncio.sleep(CALM_S)
        assert machine.brokers == machine.all[2:]
        assert [broker.state for broker in machine.brokers] == [BrokerState.SERVING] * 2
        await machine._stop()

    loop = SimulatedLoop(Random(2))
    try:
        loop.run_until_complete(live())
    finally:
        loop.shut_down()


def test_a_broker_is_handed_over_only_after_its_partition_has_moved(tmp_path: Path) -> None:
    async def live() -> None:
        machine = SimulatedMachine(Config(data=str(tmp_path), cores="3"), Random(1))
        machine.refused_share = 1.0
        for broker in machine.all:
            broker.is_calm = True
            machine._running.start(broker.name, broker.run())
        await asyncio.gather(*(broker.ready for broker in machine.all))
        lost, *others = machine.all
        lost.is_broken = True
        assert lost.process is not None
        lost.process.exit(-9)
        await asyncio.sleep(CALM_S)
        assert (machine.brokers, machine.moves) == (machine.all, 0)
        assert "a partition is being moved" in machine._given_up[NodeId(lost.node_id)]
        assert [broker.state for broker in others] == [BrokerState.SERVING] * 2
        machine.refused_share = 0.0
        await asyncio.sleep(CALM_S)
        assert (machine.brokers, machine.moves) == (others, 1)
        assert [broker.state for broker in others] == [BrokerState.SERVING] * 2
        await machine._stop()

    loop = SimulatedLoop(Random(2))
    try:
        loop.run_until_complete(live())
    finally:
        loop.shut_down()
