"""The supervisor of a machine's broker processes, when brokers hang."""

from __future__ import annotations

import asyncio
import socket
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import pytest

from millstream.cli import machine as machine_module
from millstream.cli.machine import BrokerProcess, Machine
from millstream.core.config import Config
from millstream.core.errors import AddressTaken
from millstream.core.tasks import within
from millstream_testing.waiting import until_result

ANNOUNCED = '{"kafka": "127.0.0.1:1", "listeners": ["127.0.0.1:1"], "internal": "127.0.0.1:2"}'
RESPONSES = f'echo \'{ANNOUNCED}\'; while read line; do echo \'{{"reasons": [], "warnings": ["well"]}}\'; done'
HANGS = f"echo '{ANNOUNCED}'; while read line; do :; done"


class ScriptedBroker(BrokerProcess):
    """A broker process that is a shell script."""

    script = RESPONSES

    async def _spawn(self) -> Process:
        process = await asyncio.create_subprocess_exec("sh", "-c", self.script, stdin=PIPE, stdout=PIPE)
        self._listening = asyncio.create_task(self._listen(process))
        return process


@pytest.fixture
async def machine(tmp_path: Path) -> Machine:
    made = Machine(Config(data=str(tmp_path), cores="4"))
    made.service = object()
    made.brokers = [ScriptedBroker(made, made._broker_config(node)) for node in made._layout.nodes]
    return made


@pytest.fixture
def brokers(machine: Machine) -> list[ScriptedBroker]:
    return [broker for broker in machine.brokers if isinstance(broker, ScriptedBroker)]


async def test_a_hanging_broker_is_reported_and_the_others_are_still_asked(
    machine: Machine, brokers: list[ScriptedBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "_RESPONSE_S", 0.5)
    hung, *others = brokers
    hung.script = HANGS
    running = [asyncio.create_task(broker.run()) for broker in brokers]
    await asyncio.gather(*(broker.ready for broker in brokers))

    async def others_respond() -> bool:
        await within(20, machine._refresh_health())
        health = machine._health()
        assert f"node {hung.node_id} of this machine does not respond" in health["reasons"]
        # On a busy machine another broker may be late, too.
        return len(health["reasons"]) == 1 and health["warnings"] == ["well"]

    for _ in range(2):
        await until_result(others_respond)
    await others[0].pause()
    await within(20, machine._refresh_health())
    assert f"node {others[0].node_id} of this machine is not running" in machine._health()["reasons"]
    await asyncio.gather(*(broker.stop() for broker in brokers))
    await within(20, asyncio.gather(*running))


async def test_the_first_broker_is_the_last_to_stop(machine: Machine, brokers: list[ScriptedBroker]) -> None:
    # A client that knows only the others would not find a machine that restarts with fewer of them.
    ended: list[int] = []

    async def run(broker: ScriptedBroker) -> None:
        await broker.run()
        ended.append(broker.node_id)

    running = [asyncio.create_task(run(broker)) for broker in brokers]
    await asyncio.gather(*(broker.ready for broker in brokers))
    await within(20, machine._stop())
    await within(20, asyncio.gather(*running))
    assert ended[-1] == brokers[0].node_id


async def test_a_late_start_fails_if_the_http_address_is_taken(tmp_path: Path) -> None:
    # Binding alone reserves nothing: of two sockets that are bound to an address, the first that listens gets it.
    machine = Machine(Config(data=str(tmp_path), http="127.0.0.1:0"))
    await machine._prepare_gateway()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(machine._gateway_sockets[0].getsockname())
        other.listen()
        machine._report_late_start()
    with pytest.raises(AddressTaken, match="--http"):
        await machine._serve_http()
    await machine.stop()
