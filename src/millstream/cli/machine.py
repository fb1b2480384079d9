"""`millstream serve --cores N`: a supervising process, and one broker process for each core.

The supervisor only holds the lock of the machine's data folder, the coordination store and the HTTP gateway. Each
broker is a node with its own port and subfolder. It inherits the lock, so that nothing can run on the folder while an
old broker is left, and it ends when its supervisor does: the kernel kills it, and its socket to the store closes. A
broker that dies closes that socket too, is noticed at once and started again on the same port. A broker that cannot
start is abandoned: its logs are moved to the folders of the others (`machine_folder.py`), which are stopped meanwhile.

Between the supervisor and a broker there are two pipes. The broker's input has its settings, then a line for each time
the supervisor asks for its health; it ends when the broker is to stop. Its output has where it listens, once it is
ready, then one line for each response.
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
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millstream import __version__
from millstream.broker.log.files import DiskFiles
from millstream.broker.log.folder import CLEAN_STOP_NAME, LOCK_NAME, check_own_or_empty, make_private
from millstream.broker.net.listener import ORPHAN_S, bind_with_retries, hold_address, listen
from millstream.broker.security.listeners import Listeners, address_of
from millstream.cli.broker_lifecycle import HELD, BrokerEvent, BrokerLifecycle, BrokerState
from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.core.backoff import Backoff
from millstream.core.child_process import SupervisedChild, spawn_module
from millstream.core.clock import SystemClock
from millstream.core.config import Config, ListenerConfig
from millstream.core.errors import AddressTaken, InvalidSetting, MillstreamError
from millstream.core.ids import NodeId
from millstream.core.setting import parse_address
from millstream.core.tasks import TaskSupervisor, within
from millstream.gateway.child import HttpChild
from millstream.protocol.wire.credentials import NODE_CREDENTIALS
from millstream.protocol.wire.node_status import QUESTION

if TYPE_CHECKING:
    from millstream.broker.cluster.machine_folder import Layout
    from millstream.broker.node import Broker

_logger = logging.getLogger(__name__)

MODULE: Final = "millstream.cli.machine"
STOP_S: Final = 30.0
"""How long a broker may take to stop, beyond what its settings allow it for its clients."""

FAILED_STARTS_MAX: Final = 5
"""How often in a row a broker may end before it is ready; then its logs are handed over to the others."""
LATE_S: Final = 3.0
"""A start that takes longer is explained over HTTP."""

_PR_SET_PDEATHSIG: Final = 1
_LINE_BYTES_MAX: Final = 1024 * 1024
_LAST_LINES_S: Final = 1.0
_RESPONSE_S: Final = 1.0
"""How long a broker may take to report its health; the gateway waits for all brokers of the machine."""
_SETTLE_ATTEMPTS: Final = 5


# -- the supervising process --------------------------------------------------------------------------------------


class BrokerProcess(SupervisedChild):
    def __init__(self, machine: Machine, config: Config) -> None:
        super().__init__()
        self.name = f"the process of node {config.node_id}"
        self._machine = machine
        self._config = config
        self._serving: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._lifecycle = BrokerLifecycle(FAILED_STARTS_MAX)
        self._response: asyncio.Future[None] | None = None
        """Done when the pending health request gets a response; None if none is pending."""
        self._health: dict[str, Any] | None = None
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        """The broker's announcement when it was first ready, or why it never was."""
        self.internal_address = ""
        """The address at which the gateway reaches the broker, which keeps it across restarts."""
        self._held: socket.socket | None = None
        """Keeps that address from other users meanwhile, to whom the gateway would present its secret."""
        self.exit_code = 0

    @property
    def stop_s(self) -> float:
        """Return how long the broker may take to stop."""
        return STOP_S + (self._config.shutdown_ms + self._config.leave_ms) / 1000

    @property
    def node_id(self) -> int:
        return self._config.node_id

    def configure(self, config: Config) -> None:
        """Set the settings of the next process, except for the ports, which it keeps."""
        bound = [self._config.kafka, *(listener.address for listener in self._config.listeners)]
        self._config = with_addresses(config, bound)

    @property
    def state(self) -> BrokerState:
        return self._lifecycle.state

    @property
    def health(self) -> dict[str, Any] | None:
        """Return the broker's last health report; None while it does not serve, or does not respond."""
        return self._health if self.state is BrokerState.SERVING else None

    async def pause(self) -> None:
        """Stop the process cleanly, and start no other until `resume`, which may be called after this."""
        self._lifecycle.apply(BrokerEvent.PAUSE)
        await self._terminate()
        await self._lifecycle.until(HELD)

    def resume(self) -> None:
        self._lifecycle.apply(BrokerEvent.RESUME)

    def retry(self) -> None:
        """Start the process again although it has failed to start too often."""
        self._lifecycle.apply(BrokerEvent.RETRY)

    def retire(self) -> None:
        self._lifecycle.apply(BrokerEvent.RETIRE)
        self._stopping.set()

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            if self._held is not None:
                self._held.close()

    async def stop(self) -> None:
        self.retire()
        await super().stop()
        with suppress(TimeoutError):
            await within(self.stop_s, self._lifecycle.until((BrokerState.RETIRED,)))

    async def refresh(self) -> None:
        """Request a health report; a broker that does not respond in time counts as silent."""
        process = self._process
        is_ready = self.state in (BrokerState.SERVING, BrokerState.SILENT)
        if not is_ready or process is None or process.stdin is None or process.stdin.is_closing():
            return
        if self._response is None:
            self._response = asyncio.get_running_loop().create_future()
            process.stdin.write(QUESTION)
        responded, _ = await asyncio.wait([self._response], timeout=_RESPONSE_S)
        if not responded:
            # The request stays pending: a late response still counts.
            self._lifecycle.apply(BrokerEvent.TIMED_OUT)

    async def _wait_until_needed(self) -> None:
        if self.state is BrokerState.LOST:
            await self._machine.hand_over(self)
        await self._lifecycle.until((BrokerState.DUE, BrokerState.RETIRED))
        self._lifecycle.apply(BrokerEvent.SPAWN)

    async def _spawn(self) -> Process:
        machine = self._machine
        mine, theirs = socket.socketpair()
        try:
            descriptors = [theirs.fileno(), machine.lock]
            process = await spawn_module(MODULE, *map(str, descriptors), pass_fds=descriptors, limit=_LINE_BYTES_MAX)
        except BaseException:
            mine.close()
            self._lifecycle.apply(BrokerEvent.SPAWN_FAILED)
            raise
        finally:
            theirs.close()
        if machine.service is None:
            mine.close()
        else:
            from millstream.broker.cluster.socket_store import StoreServer

            self._serving = asyncio.create_task(StoreServer(machine.service, machine.clock).run(mine))
        if process.stdin is not None:
            process.stdin.write(json.dumps(machine.share(self._config, self.internal_address)).encode() + b"\n")
        self._listening = asyncio.create_task(self._listen(process))
        return process

    async def _listen(self, process: Process) -> None:
        """Read the broker's output: its addresses, which it keeps when it is restarted, and its health."""
        if process.stdout is None:
            return
        line = await process.stdout.readline()
        if not line:
            return
        announced: dict[str, Any] = json.loads(line)
        self._config = with_addresses(self._config, announced["listeners"])
        self.internal_address = announced["internal"]
        if self._held is None:
            self._held = hold_address(*parse_address(self.internal_address, name="internal"))
        self._lifecycle.apply(BrokerEvent.READY)
        self._machine.started(NodeId(self.node_id))
        if not self.ready.done():
            self.ready.set_result(announced)
        while line := await process.stdout.readline():
            self._health = json.loads(line)
            self._lifecycle.apply(BrokerEvent.RESPONDED)
            self._end_health_request()

    def _end_health_request(self) -> None:
        response, self._response = self._response, None
        if response is not None:
            response.set_result(None)

    async def _wait_for_exit(self, process: Process) -> int:
        if self.state in (BrokerState.STOPPING, BrokerState.RETIRING):
            # It was being spawned when it was asked to end.
            await self._terminate()
        code = self.exit_code = await super()._wait_for_exit(process)
        if self._listening is not None:
            # Read all its output before acting on its end. A process that it started may still hold the pipe.
            await asyncio.wait([self._listening], timeout=_LAST_LINES_S)
            self._listening.cancel()
        self._health = None
        self._end_health_request()
        is_failed_start = self.state is BrokerState.STARTING
        self._lifecycle.apply(BrokerEvent.EXITED)
        if is_failed_start and not self.ready.done():
            # Its first start failed with a reason: restarting would not help.
            self.ready.set_exception(CommandFailed(f"node {self.node_id} did not start", _exit_code(code)))
            self.retire()
        return code


def _exit_code(code: int) -> ExitCode:
    with suppress(ValueError):
        return ExitCode(code)
    return ExitCode.FAILED


class Machine:
    def __init__(self, config: Config) -> None:
        from millstream.broker.cluster.machine_folder import Layout

        self._config = config
        self._data = os.path.abspath(config.data)
        self._layout = Layout.of(self._data, config.node_id, config.core_count)
        self._secret = secrets.token_urlsafe(32)
        self._assertion_seed = secrets.token_hex(32)
        self._stack = AsyncExitStack()
        self._running = TaskSupervisor()
        self.failed = self._running.failed
        """Fails if a broker is no longer kept running, which is a defect."""
        self.clock = SystemClock()
        self.service: Any = None
        """The coordination store; None in a cluster."""
        self.lock = -1
        self.brokers: list[BrokerProcess] = []
        self._files = DiskFiles()
        self._listeners = Listeners(config, secret=self._secret)
        self._gateway: HttpChild | None = None
        self._gateway_sockets: list[socket.socket] = []
        self._http = self._registry = ""
        self._gateway_runs = False
        self._address_taken: AddressTaken | None = None
        self._starting = "the machine is starting"
        self._given_up: dict[NodeId, str] = {}
        """Nodes that could not be started, and the state of their logs."""
        self._changing = asyncio.Lock()
        self._is_stopping = False

    async def start(self) -> None:
        """Start every broker, and wait until all are ready."""
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def stop(self) -> None:
        await self._stack.aclose()

    def share(self, config: Config, internal_address: str) -> dict[str, Any]:
        return {
            "config": dataclasses.asdict(config),
            "http": self._http,
            "internal": internal_address,
            "supervisor": os.getpid(),
            "data": self._data,
            "nodes": list(self._layout.nodes),
            "secret": self._secret,
            "assertion_seed": self._assertion_seed,
            "has_store": self.service is not None,
        }

    def describe(self) -> dict[str, Any]:
        """Return a JSON document for programs, once all brokers are ready."""
        announced = [broker.ready.result() for broker in self.brokers]
        nodes = [
            {"id": broker.node_id, "pid": broker.pid, "kafka": announcement["kafka"]}
            for broker, announcement in zip(self.brokers, announced, strict=True)
        ]
        registry = {"registry": self._registry} if self._registry else {}
        return {"kafka": announced[0]["kafka"], "http": self._http, **registry, "nodes": nodes}

    async def _start(self) -> None:
        from millstream.broker.cluster.machine_folder import settle

        files = self._files
        self._listeners.check()
        # The gateway signs in at the brokers with these credentials.
        NODE_CREDENTIALS.set(self._listeners.node_credentials)
        check_own_or_empty(self._data, files)
        os.makedirs(self._data, mode=0o700, exist_ok=True)
        self.lock = files.lock(f"{self._data}/{LOCK_NAME}")
        self._stack.callback(os.close, self.lock)
        make_private(Path(self._data))
        self._layout.check_owner(files, in_cluster=self._config.in_cluster)
        if self._config.http:
            await self._prepare_gateway()
        if not self._config.in_cluster:
            if not self._layout.is_settled(files):
                self._starting = "the logs are moved between the folders of the broker processes"
                await self._explain_start()
            await settle(self._layout, files, self.clock, sealing=self._sealing(), is_locked=True)
            await self._open_stores(files)
        self._starting = "the logs are opened"
        self.brokers = [BrokerProcess(self, self._broker_config(node)) for node in self._layout.nodes]
        self._stack.push_async_callback(self._stop)
        for broker in self.brokers:
            self._running.start(broker.name, broker.run())
        await asyncio.gather(*(broker.ready for broker in self.brokers))
        await self._serve_http()

    def _broker_config(self, node: NodeId) -> Config:
        number = (node - self._config.node_id) // _id_step()
        return broker_config(
            self._config, self._layout.folders[node], number, runs_pipelines=node == self._layout.nodes[0]
        )

    # -- HTTP -----------------------------------------------------------------------------------------------

    async def _prepare_gateway(self) -> None:
        """Bind the addresses of the gateway; it is started when the brokers are ready, or are late."""
        config, files = self._config, self._files
        # After a kill, the gateway of the last run may not have noticed it yet.
        was_killed = any(not files.exists(f"{folder}/{CLEAN_STOP_NAME}") for folder in self._layout.present(files))
        wait_s = ORPHAN_S if was_killed else 0.0
        for given, flag in ((config.http, "http"), (config.registry, "registry")):
            if given:
                bound = await bind_with_retries(*parse_address(given, name=flag), flag=flag, wait_s=wait_s)
                self._gateway_sockets.append(bound)
                self._stack.callback(bound.close)
        http, *registry = self._gateway_sockets
        self._http = address_of(http)
        self._registry = address_of(registry[0]) if registry else ""
        self._gateway = HttpChild.configured(
            config, http, with_port_offset(config.kafka, 0), registry=registry[0] if registry else None
        )
        self._stack.push_async_callback(self._gateway.stop)
        late = asyncio.get_running_loop().call_later(LATE_S, self._report_late_start)
        self._stack.callback(late.cancel)

    def _report_late_start(self) -> None:
        # Raised here, the error would not reach anyone.
        try:
            self._report_slow_start()
        except AddressTaken as error:
            self._address_taken = error

    def _report_slow_start(self) -> None:
        if self._gateway is not None and not self._gateway_runs and not self._is_stopping:
            self._gateway.report_starting(self._starting)
            self._run_gateway(self._gateway)

    async def _explain_start(self) -> None:
        """Make the gateway report why the machine is not up yet, before the loop is busy."""
        self._report_slow_start()
        if self._gateway is not None:
            with suppress(TimeoutError):
                await within(LATE_S, self._gateway.spawned())

    def _run_gateway(self, gateway: HttpChild) -> None:
        if self._gateway_runs:
            return
        self._gateway_runs = True
        for bound, flag in zip(self._gateway_sockets, ("http", "registry"), strict=False):
            listen(bound, flag=flag)
        self._running.start("the HTTP gateway", gateway.run())

    async def _serve_http(self) -> None:
        """Make the gateway serve requests: the brokers are ready."""
        gateway = self._gateway
        if gateway is not None:
            await self._refresh_health()
            if self._address_taken is not None:
                raise self._address_taken
            gateway.connect_to(",".join(broker.internal_address for broker in self.brokers))
            gateway.serve_status(self._health, refresh=self._refresh_health)
            self._run_gateway(gateway)

    async def _refresh_health(self) -> None:
        await asyncio.gather(*(broker.refresh() for broker in self.brokers))

    def _health(self) -> dict[str, Any]:
        """Return the health of the machine: that of all its brokers."""
        from millstream.broker.node import not_running

        reasons: dict[str, None] = {}
        warnings: dict[str, None] = dict.fromkeys(self._given_up.values())
        for broker in self.brokers:
            if broker.state is BrokerState.SILENT:
                reasons[f"node {broker.node_id} of this machine does not respond"] = None
            elif broker.health is None:
                reasons[not_running(NodeId(broker.node_id))] = None
            else:
                reasons.update(dict.fromkeys(broker.health["reasons"]))
                warnings.update(dict.fromkeys(broker.health["warnings"]))
        return {
            "node_id": self._config.node_id,
            "nodes": [broker.node_id for broker in self.brokers],
            "version": __version__,
            "reasons": list(reasons),
            "warnings": list(warnings),
        }

    # -- abandoned brokers ----------------------------------------------------------------------------------

    def started(self, node: NodeId) -> None:
        """Record that a broker is ready, possibly one that had been abandoned."""
        self._given_up.pop(node, None)

    async def hand_over(self, lost: BrokerProcess) -> None:
        """Move the logs of a broker that cannot be started to the folders of the others, if they can be read.

        Other lost brokers wait for their turn: they count as paused meanwhile, and stay lost when the others are
        resumed.
        """
        node = NodeId(lost.node_id)
        async with self._changing:
            # In a cluster, the replicas on other machines take over.
            if not self._is_stopping and self.service is not None and len(self.brokers) > 1:
                _logger.error(
                    "node %d cannot be started; its logs are handed over to the other nodes of this machine", node
                )
                try:
                    await self._hand_over(lost, node)
                except (MillstreamError, OSError) as error:
                    self._given_up[node] = f"node {node} cannot be started, and its logs cannot be handed over: {error}"
                    _logger.error("%s", self._given_up[node])
            lost.retry()

    async def _hand_over(self, lost: BrokerProcess, node: NodeId) -> None:
        layout = self._layout.without(node)
        # The others keep running while the logs are checked.
        await self._check_moves(layout)
        await self._close_logs(node)
        others = [broker for broker in self.brokers if broker is not lost]
        await asyncio.gather(*(broker.pause() for broker in others))
        if self._is_stopping:
            return
        try:
            # One may have begun since.
            await self._check_moves(layout)
        except MillstreamError:
            for broker in others:
                broker.resume()
            raise
        self._layout = layout
        self.brokers = others
        lost.retire()
        self._given_up[node] = (
            f"node {node} could not be started {FAILED_STARTS_MAX} times in a row, and the other nodes of this machine "
            "have its partitions; restart the machine to use all cores again"
        )
        await self._move_logs()
        for broker in others:
            broker.configure(self._broker_config(NodeId(broker.node_id)))
            broker.resume()

    async def _check_moves(self, layout: Layout) -> None:
        """Raise if a plan is moving a partition to or from a node that this layout lacks."""
        from millstream.broker.cluster.embedded_store import EmbeddedStore
        from millstream.broker.cluster.machine_folder import FolderSettlement

        await FolderSettlement(layout, self._files, self.clock, EmbeddedStore(self.service, self.clock)).check()

    async def _close_logs(self, node: NodeId) -> None:
        from millstream.broker.cluster.machine_folder import close_cleanly

        folder = self._layout.folders[node]
        await asyncio.to_thread(asyncio.run, close_cleanly(folder, self._files, self.clock, is_locked=False))

    async def _move_logs(self) -> None:
        """Move the logs. Only a machine whose logs are all in their place may go on; else the next start continues."""
        from millstream.broker.catalog.catalog import Catalog
        from millstream.broker.cluster.machine_folder import move_logs

        backoff = Backoff()
        for attempts_left in reversed(range(_SETTLE_ATTEMPTS)):
            try:
                with closing(Catalog.open_folder(Path(self._data), sealing=self._sealing())) as catalog:
                    return await move_logs(self._layout, self._files, self.clock, self.service, catalog)
            except (MillstreamError, OSError) as error:
                if not attempts_left:
                    raise CommandFailed(f"logs could not be handed over: {error}") from error
                _logger.error("logs could not be handed over; trying again", extra={"error": str(error)})
                await backoff.pause()
        return None

    def _sealing(self) -> Any:
        from millstream.broker.catalog.sealing import Sealing

        return Sealing.of_node(self._config.secrets_key_file, self._data, in_cluster=False)

    async def _open_stores(self, files: DiskFiles) -> None:
        from millstream.broker.catalog.catalog import Catalog
        from millstream.broker.cluster.embedded_store import EmbeddedStore
        from millstream.broker.cluster.machine_folder import adopt_known_topics, open_coordination

        self.service = open_coordination(files, self._data, self.clock)
        self._stack.callback(self.service.close)
        # Its tables are created here once, not by all brokers concurrently.
        catalog = Catalog.open_folder(Path(self._data), sealing=self._sealing())
        try:
            await adopt_known_topics(EmbeddedStore(self.service, self.clock), catalog)
        finally:
            catalog.close()

    async def _stop(self) -> None:
        self._is_stopping = True
        if self._gateway is not None:
            # Requests in progress are finished while the brokers still respond.
            await self._gateway.stop()
        last = self.brokers if self.service is None else self.brokers[:1]
        # On a machine without a cluster, the first broker stops last, so that clients know it to the end: its port is
        # used again regardless of the next number of cores. A client that knows only unused ports may never reconnect.
        await asyncio.gather(*(broker.stop() for broker in self.brokers if broker not in last))
        await asyncio.gather(*(broker.stop() for broker in last))
        await self._running.close()
        for broker in self.brokers:
            broker.ready.cancel()

    @property
    def stop_failures(self) -> list[str]:
        """Return the nodes that did not stop cleanly, once all have stopped."""
        return [f"node {broker.node_id}" for broker in self.brokers if broker.exit_code != 0]


def broker_config(config: Config, folder: str, number: int, *, runs_pipelines: bool) -> Config:
    """Return the settings of one broker process: the ports follow those of the first, and none serves HTTP."""
    data = os.path.abspath(config.data)
    return config.replace(
        data=folder,
        node_id=config.node_id + number * _id_step(),
        cores=str(config.core_count),
        kafka=with_port_offset(config.kafka, number),
        advertise=with_port_offset(config.advertise, number),
        listeners=tuple(
            dataclasses.replace(
                listener,
                address=with_port_offset(listener.address, number),
                advertise=with_port_offset(listener.advertise, number),
            )
            for listener in config.listeners
        ),
        http="",
        registry="",
        pipelines_enabled=config.pipelines_enabled and runs_pipelines,
        pipelines_lake=config.pipelines_lake or f"{data}/lake",
        pipelines_folder=config.pipelines_folder or f"{data}/pipelines",
    )


def _id_step() -> int:
    from millstream.broker.cluster.machine_folder import ID_STEP

    return ID_STEP


def with_port_offset(address: str, number: int) -> str:
    """Return the address with its port raised by a number; port 0, for any free one, stays."""
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
            dataclasses.replace(listener, address=address)
            for listener, address in zip(config.listeners, bound[1:], strict=True)
        ),
    )


# -- one broker process -------------------------------------------------------------------------------------------


def main() -> None:
    """Run one broker until the supervisor closes the pipe."""
    import uvloop

    from millstream.cli.app import run_reporting
    from millstream.cli.serve import THREAD_SWITCH_S
    from millstream.core.log_format import set_up_logging

    _die_with_parent()
    descriptor, lock = map(int, sys.argv[1:])
    for inherited in (descriptor, lock):
        # Otherwise this broker's children would inherit them, and its end would be noticed only when they end.
        os.set_inheritable(inherited, False)
    share = json.loads(sys.stdin.buffer.readline())
    if os.getppid() != share["supervisor"]:
        sys.exit(ExitCode.FAILED)
    # Ctrl-C reaches only the supervisor, but a service manager may signal all of its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = config_of(share["config"])
    set_up_logging(config.log_level, config.log_format, node=config.node_id)
    sys.setswitchinterval(THREAD_SWITCH_S)
    sys.exit(run_reporting(lambda: uvloop.run(_run_broker(share, config, descriptor))))


def config_of(values: dict[str, Any]) -> Config:
    """Build a configuration from what `dataclasses.asdict` made of it."""
    listeners = tuple(ListenerConfig(**listener) for listener in values.pop("listeners"))
    return Config(**values, listeners=listeners)


def _die_with_parent() -> None:
    """Make the kernel kill this process when the supervisor ends in any way."""
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
        data=share["data"],
        nodes=tuple(map(NodeId, share["nodes"])),
        http=share["http"],
        internal=share["internal"],
        secret=share["secret"],
        assertion_seed=share["assertion_seed"],
        store=store,
    )
    broker = Broker(config, children=CHILD_PROCESSES, machine=machine)
    hung_up = asyncio.get_running_loop().create_future()
    watching = asyncio.create_task(_watch_input(broker, hung_up))
    await run_until_stopped(broker, hung_up, lambda: _announce(broker))
    watching.cancel()


async def _watch_input(broker: Broker, hung_up: asyncio.Future[None]) -> None:
    """Respond to health requests until the end of the standard input: then the supervisor wants this broker to stop."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        health = broker.health()
        if health is not None:
            _print_line(health)
    if not hung_up.done():
        hung_up.set_result(None)


def _supervisor_lost() -> None:
    # Acknowledged data is stored. Without its supervisor this process must stop at once.
    _logger.error("the supervising process is gone")
    os._exit(ExitCode.FAILED)


def _announce(broker: Broker) -> None:
    _print_line(
        {
            "kafka": broker.kafka_address,
            "listeners": broker.listener_addresses,
            "internal": broker.internal_address,
        }
    )


def _print_line(line: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
