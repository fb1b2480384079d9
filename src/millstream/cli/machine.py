"""`millstream serve --cores N`: a supervising process, and one broker process for each core.

The supervisor holds the lock of the machine's data folder and the coordination store, and does nothing else. Each
broker is a node with a port and a subfolder of its own. It inherits the lock, so that nothing can run on the folder
while an old broker is left, and it ends when its supervisor does: the kernel kills it, and its socket to the store
closes. A broker that dies closes that socket too, is noticed at once and started again on the same port.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import json
import logging
import os
import secrets
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final

from millstream.broker.log.files import DiskFiles
from millstream.broker.log.folder import LOCK_NAME, make_private
from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.core.child_process import SupervisedChild
from millstream.core.clock import SystemClock
from millstream.core.config import Config, ListenerConfig
from millstream.core.errors import ClusterMismatch, InvalidSetting
from millstream.core.ids import NodeId
from millstream.core.setting import parse_address
from millstream.core.tasks import TaskSupervisor

_logger = logging.getLogger(__name__)

MODULE: Final = "millstream.cli.machine"
STOP_S: Final = 30.0
"""How long a broker may take to stop, beyond what its settings allow it for its clients."""

_PR_SET_PDEATHSIG: Final = 1


# -- the supervising process --------------------------------------------------------------------------------------


class BrokerProcess(SupervisedChild):
    """Keeps one broker process running."""

    def __init__(self, machine: Machine, config: Config) -> None:
        super().__init__()
        self.name = f"the process of node {config.node_id}"
        self._machine = machine
        self._config = config
        self._serving: asyncio.Task[None] | None = None
        self._announcing: asyncio.Task[None] | None = None
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        """What the broker announced when it was ready for the first time, or why it never was."""
        self.exit_code = 0

    @property
    def stop_s(self) -> float:
        """Return how long the broker may take to stop."""
        return STOP_S + (self._config.shutdown_ms + self._config.leave_ms) / 1000

    @property
    def node_id(self) -> int:
        """Return the id of the node."""
        return self._config.node_id

    async def _spawn(self) -> Process:
        machine = self._machine
        mine, theirs = socket.socketpair()
        try:
            # In a session of its own: Ctrl-C in a terminal is for the supervisor, which stops all of them in order.
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                MODULE,
                str(theirs.fileno()),
                stdin=PIPE,
                stdout=PIPE,
                pass_fds=[theirs.fileno(), machine.lock],
                start_new_session=True,
            )
        except BaseException:
            mine.close()
            raise
        finally:
            theirs.close()
        if machine.service is None:
            mine.close()
        else:
            from millstream.broker.cluster.socket_store import StoreServer

            self._serving = asyncio.create_task(StoreServer(machine.service, machine.clock).run(mine))
        if process.stdin is not None:
            process.stdin.write(json.dumps(machine.share(self._config)).encode() + b"\n")
        self._announcing = asyncio.create_task(self._announced(process))
        return process

    async def _announced(self, process: Process) -> None:
        """Take what the broker prints when it is ready; it keeps its port when it is started again."""
        line = b"" if process.stdout is None else await process.stdout.readline()
        if not line:
            return
        announced: dict[str, Any] = json.loads(line)
        self._config = with_addresses(self._config, announced["listeners"])
        if not self.ready.done():
            self.ready.set_result(announced)

    async def _ended(self, process: Process) -> int:
        code = self.exit_code = await super()._ended(process)
        if not self.ready.done() and not self._stopping.is_set():
            # Its first start failed, and it has said why: what is wrong will not pass by itself.
            self.ready.set_exception(CommandFailed(f"node {self.node_id} did not start", _exit_code(code)))
            self._stopping.set()
        return code

    def _hang_up(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()


def _exit_code(code: int) -> ExitCode:
    with suppress(ValueError):
        return ExitCode(code)
    return ExitCode.FAILED


class Machine:
    """The broker processes of a machine, and what they share."""

    def __init__(self, config: Config) -> None:
        from millstream.broker.cluster.machine_folder import Layout

        self._config = config
        self._data = os.path.abspath(config.data)
        self._layout = Layout.of(self._data, config.node_id, config.core_count)
        self._secret = secrets.token_urlsafe(32)
        self._stack = AsyncExitStack()
        self._running = TaskSupervisor()
        self.failed = self._running.failed
        """Fails if a broker is no longer kept running, which is a defect."""
        self.clock = SystemClock()
        self.service: Any = None
        """The coordination store; None in a cluster."""
        self.lock = -1
        self.brokers: list[BrokerProcess] = []

    async def start(self) -> None:
        """Start every broker, and wait until all are ready."""
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def stop(self) -> None:
        """Stop every broker in order, then release the folder."""
        await self._stack.aclose()

    def share(self, config: Config) -> dict[str, Any]:
        """Return what a broker process is told."""
        return {
            "config": dataclasses.asdict(config),
            "supervisor": os.getpid(),
            "data": self._data,
            "nodes": list(self._layout.nodes),
            "secret": self._secret,
            "has_store": self.service is not None,
        }

    def described(self) -> dict[str, Any]:
        """Return a JSON document for programs, once all brokers are ready."""
        announced = [broker.ready.result() for broker in self.brokers]
        nodes = [
            {"id": broker.node_id, "pid": broker.pid, "kafka": one["kafka"]}
            for broker, one in zip(self.brokers, announced, strict=True)
        ]
        first = announced[0]
        registry = {"registry": first["registry"]} if first["registry"] else {}
        return {"kafka": first["kafka"], "http": first["http"], **registry, "nodes": nodes}

    async def _start(self) -> None:
        from millstream.broker.cluster.machine_folder import settle

        files = DiskFiles()
        os.makedirs(self._data, mode=0o700, exist_ok=True)
        self.lock = files.lock(f"{self._data}/{LOCK_NAME}")
        self._stack.callback(os.close, self.lock)
        make_private(Path(self._data))
        self._layout.check_owner(files, in_cluster=self._config.in_cluster)
        if self._config.in_cluster:
            if not self._layout.is_settled(files):
                raise ClusterMismatch(
                    f"{self._data} was used with another number of cores or another node id, which a node of a cluster "
                    "cannot change; start it as before"
                )
        else:
            await settle(self._layout, files, self.clock, sealing=self._sealing(), is_locked=True)
            await self._open_stores(files)
        for number, node in enumerate(self._layout.nodes):
            self.brokers.append(BrokerProcess(self, broker_config(self._config, self._layout.folders[node], number)))
        self._stack.push_async_callback(self._stop)
        for broker in self.brokers:
            self._running.start(broker.name, broker.run())
        await asyncio.gather(*(broker.ready for broker in self.brokers))

    def _sealing(self) -> Any:
        from millstream.broker.catalog.sealing import Sealing

        return Sealing.of_node(self._config.secrets_key_file, self._data, in_cluster=False)

    async def _open_stores(self, files: DiskFiles) -> None:
        from millstream.broker.catalog.catalog import Catalog
        from millstream.broker.cluster.embedded_store import EmbeddedStore
        from millstream.broker.cluster.machine_folder import adopt_known_topics, open_coordination

        self.service = open_coordination(files, self._data, self.clock)
        self._stack.callback(self.service.close)
        # Its tables are made here, once, and not by all brokers at the same time.
        catalog = Catalog.open_folder(Path(self._data), sealing=self._sealing())
        try:
            await adopt_known_topics(EmbeddedStore(self.service, self.clock), catalog)
        finally:
            catalog.close()

    async def _stop(self) -> None:
        await asyncio.gather(*(broker.stop() for broker in self.brokers))
        await self._running.close()
        for broker in self.brokers:
            broker.ready.cancel()

    @property
    def stop_failures(self) -> list[str]:
        """Return the nodes that did not stop cleanly, once all have stopped."""
        return [f"node {broker.node_id}" for broker in self.brokers if broker.exit_code != 0]


def broker_config(config: Config, folder: str, number: int) -> Config:
    """Return the settings of one broker process: the ports follow those of the first, which alone serves HTTP."""
    is_first = number == 0
    data = os.path.abspath(config.data)
    return config.replace(
        data=folder,
        node_id=config.node_id + number * _id_step(),
        cores=str(config.core_count),
        kafka=shifted(config.kafka, number),
        advertise=shifted(config.advertise, number),
        listeners=tuple(
            dataclasses.replace(one, address=shifted(one.address, number), advertise=shifted(one.advertise, number))
            for one in config.listeners
        ),
        http=config.http if is_first else "",
        registry=config.registry if is_first else "",
        pipelines_enabled=config.pipelines_enabled and is_first,
        pipelines_lake=config.pipelines_lake or f"{data}/lake",
        pipelines_folder=config.pipelines_folder or f"{data}/pipelines",
    )


def _id_step() -> int:
    from millstream.broker.cluster.machine_folder import ID_STEP

    return ID_STEP


def shifted(address: str, number: int) -> str:
    """Return an address whose port is so many further on; port 0 stays, for any free one."""
    if not address:
        return ""
    _, port = parse_address(address, name="address")
    if port + number > 65535:
        raise InvalidSetting(f"{address} leaves no room for the ports of {number + 1} broker processes")
    return f"{address.rpartition(':')[0]}:{port + number if port else 0}"


def with_addresses(config: Config, bound: Sequence[str]) -> Config:
    """Return settings with the ports that a broker got, so that it gets them again."""
    return config.replace(
        kafka=bound[0],
        listeners=tuple(
            dataclasses.replace(one, address=address) for one, address in zip(config.listeners, bound[1:], strict=True)
        ),
    )


# -- one broker process -------------------------------------------------------------------------------------------


def main() -> None:
    """Run one broker until the supervisor hangs up."""
    import uvloop

    from millstream.cli.app import run_reporting
    from millstream.cli.serve import THREAD_SWITCH_S
    from millstream.core.log_format import set_up_logging

    _die_with_parent()
    share = json.loads(sys.stdin.buffer.readline())
    if os.getppid() != share["supervisor"]:
        sys.exit(ExitCode.FAILED)
    # Ctrl-C reaches only the supervisor, but whoever stops a service may signal all of its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = config_of(share["config"])
    set_up_logging(config.log_level, config.log_format, node=config.node_id)
    sys.setswitchinterval(THREAD_SWITCH_S)
    sys.exit(run_reporting(lambda: uvloop.run(_run_broker(share, config, int(sys.argv[1])))))


def config_of(values: dict[str, Any]) -> Config:
    """Build a configuration from what `dataclasses.asdict` made of it."""
    listeners = tuple(ListenerConfig(**one) for one in values.pop("listeners"))
    return Config(**values, listeners=listeners)


def _die_with_parent() -> None:
    """Let the kernel kill this process when the supervisor ends in any way."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        _logger.warning("the kernel cannot end this process with its supervisor")


async def _run_broker(share: dict[str, Any], config: Config, descriptor: int) -> None:
    from millstream.broker.cluster.socket_store import SocketStore
    from millstream.broker.node import Broker, MachineShare
    from millstream.child_processes import CHILD_PROCESSES
    from millstream.cli.serve import run_until_stopped

    store = None
    if share["has_store"]:
        store = SocketStore(socket.socket(fileno=descriptor), SystemClock(), on_lost=_supervisor_lost)
    machine = MachineShare(
        data=share["data"], nodes=tuple(map(NodeId, share["nodes"])), secret=share["secret"], store=store
    )
    broker = Broker(config, children=CHILD_PROCESSES, machine=machine)
    hung_up = asyncio.get_running_loop().create_future()
    watching = asyncio.create_task(_watch_input(hung_up))
    await run_until_stopped(broker, hung_up, lambda: _announce(broker))
    watching.cancel()


async def _watch_input(hung_up: asyncio.Future[None]) -> None:
    """Wait for the end of the standard input: the supervisor wants this broker to stop."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    if not hung_up.done():
        hung_up.set_result(None)


def _supervisor_lost() -> None:
    # What was acknowledged is stored. Without its supervisor this process must not go on for a moment.
    _logger.error("the supervising process is gone")
    os._exit(ExitCode.FAILED)


def _announce(broker: Any) -> None:
    line = {
        "kafka": broker.kafka_address,
        "http": broker.http_address,
        "registry": broker.registry_address,
        "listeners": broker.listener_addresses,
    }
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
