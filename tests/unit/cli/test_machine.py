"""The supervisor of a machine's broker processes, when brokers fail or hang."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import pytest

from millstream.broker.cluster import machine_folder
from millstream.cli import machine as machine_module
from millstream.cli.machine import FAILED_STARTS_MAX, BrokerProcess, Machine
from millstream.core.config import Config
from millstream.core.tasks import within

ANNOUNCED = '{"kafka": "127.0.0.1:1", "listeners": ["127.0.0.1:1"], "internal": "127.0.0.1:2"}'
ANSWERS = f'echo \'{ANNOUNCED}\'; while read line; do echo \'{{"reasons": [], "warnings": ["well"]}}\'; done'
HANGS = f"echo '{ANNOUNCED}'; while read line; do :; done"


class ScriptedBroker(BrokerProcess):
    """A broker process that is a shell script."""

    script = ANSWERS

    async def _spawn(self) -> Process:
        process = await asyncio.create_subprocess_exec("sh", "-c", self.script, stdin=PIPE, stdout=PIPE)
        self._listening = asyncio.create_task(self._listen(process))
        return process

    def give_up(self) -> None:
        """Be a broker that has failed to start too often."""
        self._failed_starts = FAILED_STARTS_MAX


@pytest.fixture
async def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    async def nothing(*_: Any, **__: Any) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(machine_folder, "close_cleanly", nothing)
    monkeypatch.setattr(Machine, "_settle_again", nothing)
    made = Machine(Config(data=str(tmp_path), cores="4"))
    made.service = object()
    made.brokers = [ScriptedBroker(made, made._broker_config(node)) for node in made._layout.nodes]
    return made


@pytest.fixture
def brokers(machine: Machine) -> list[ScriptedBroker]:
    return [broker for broker in machine.brokers if isinstance(broker, ScriptedBroker)]


async def test_brokers_that_give_up_together_all_hand_over_their_logs(
    machine: Machine, brokers: list[ScriptedBroker]
) -> None:
    dead, living = brokers[:2], brokers[2:]
    running = [asyncio.create_task(broker.run()) for broker in living]
    await asyncio.gather(*(broker.ready for broker in living))
    for broker in dead:
        broker.give_up()
    await within(20, asyncio.gather(*(broker.run() for broker in dead)))
    assert machine.brokers == living
    async with asyncio.timeout(20):
        while any(broker.pid is None for broker in living):
            await asyncio.sleep(0.01)
    await asyncio.gather(*(broker.stop() for broker in living))
    await within(20, asyncio.gather(*running))
    assert all(broker.pid is None for broker in dead)


async def test_a_broker_whose_logs_were_moved_while_it_waited_is_not_started(
    machine: Machine, brokers: list[ScriptedBroker]
) -> None:
    brokers[0].give_up()
    machine.brokers = list(brokers[1:])
    await within(20, brokers[0].run())
    assert brokers[0].pid is None
    assert machine.brokers == brokers[1:]


async def test_a_broker_that_hangs_is_reported_and_the_others_are_asked_all_the_same(
    machine: Machine, brokers: list[ScriptedBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "_ANSWER_S", 0.5)
    hung, *others = brokers
    hung.script = HANGS
    running = [asyncio.create_task(broker.run()) for broker in brokers]
    await asyncio.gather(*(broker.ready for broker in brokers))
    for _ in range(2):
        await within(20, machine._refresh_health())
        health = machine._health()
        assert health["reasons"] == [f"node {hung.node_id} of this machine does not answer"]
        assert health["warnings"] == ["well"]
    await others[0].pause()
    await within(20, machine._refresh_health())
    assert f"node {others[0].node_id} of this machine is not running" in machine._health()["reasons"]
    await asyncio.gather(*(broker.stop() for broker in brokers))
    await within(20, asyncio.gather(*running))
