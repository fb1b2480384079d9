"""The processes of a cluster trial: etcd, PostgreSQL and nodes, with links, disks and clocks that can fail."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

from millstream.broker.catalog.sealing import SecretKey, write_keys
from millstream.client.admin.cluster_status import ClusterStatus, cluster_status
from millstream.core.errors import MillstreamError
from millstream.protocol.wire.client import Client
from millstream_testing.cluster_network import Network, RelayNetwork
from millstream_testing.etcd_server import EtcdServer
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.server import Server
from millstream_testing.stepped_serve import PROGRAM, step

T = TypeVar("T")

DISK_BYTES = 2 * 1024**3
_LEFT_BYTES = 4096
_REQUEST_S_MAX = 10.0


class TrialNode(Server):
    """A node: a server process at its place in the network, with its own clock."""

    def __init__(
        self,
        number: int,
        folder: Path,
        network: Network,
        settings: Mapping[str, object],
        program: Sequence[str] = PROGRAM,
    ) -> None:
        home = folder / f"node-{number}"
        home.mkdir(parents=True)
        super().__init__(home / "data", settings=settings, log=folder / f"node-{number}.log")
        self.number = number
        self.home = home
        self.kafka, self.http = network.addresses(number)
        self._network = network
        self._program = program
        self._clock = folder / f"node-{number}.clock"
        self.is_paused = False
        self._is_ready = False
        step(self._clock, 0)

    def command(self) -> Sequence[str]:
        """The command line, inside its namespace if it has one."""
        python, m, _, *serve = super().command()
        stepped = [python, m, *self._program, str(self._clock), *serve]
        return self._network.command(self.number, stepped)

    @property
    def must_respond(self) -> bool:
        """Whether it has started, and is neither stopping nor paused."""
        return self._is_ready and self.is_running() and not self.is_paused

    def start(self) -> Self:
        """Start, and wait until it is ready."""
        super().start()
        self._is_ready = True
        return self

    def stop(self) -> int:
        self._is_ready = False
        return super().stop()

    def end(self) -> None:
        """Kill the process, if it is running."""
        self._is_ready = False
        super().end()

    def pause(self) -> None:
        """Pause the process. Only the main one: the watcher must see this process end."""
        self.is_paused = True
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.is_paused = False

    def dump_stacks(self) -> None:
        """Make it write the stacks of its threads to its log."""
        os.kill(self.pid, signal.SIGUSR2)

    def step_clock(self, off_ms: int) -> None:
        """Set the offset of its wall clock."""
        step(self._clock, off_ms)


class Disk:
    """A file system for one node, which can be filled. Needs root."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Self:
        self._mount(f"size={DISK_BYTES}", "-t", "tmpfs", "millstream-trial")
        return self

    def __exit__(self, *exception: object) -> None:
        subprocess.run(["umount", "--lazy", str(self._folder)], check=False, capture_output=True)

    def fill(self) -> None:
        """Fill the disk. The size of the file system shrinks, so this costs no memory."""
        found = os.statvfs(self._folder)
        used = (found.f_blocks - found.f_bfree) * found.f_frsize
        self._mount(f"remount,size={used + _LEFT_BYTES}")

    def free(self) -> None:
        self._mount(f"remount,size={DISK_BYTES}")

    def _mount(self, options: str, *more: str) -> None:
        command = ["mount", *more, "-o", options, str(self._folder)]
        subprocess.run(command, check=True, capture_output=True, text=True)


def can_mount() -> bool:
    """Whether a file system can be mounted here."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


class TrialCluster:
    """All processes. Leaving it ends them and removes what was mounted or set up for them."""

    def __init__(
        self,
        folder: Path,
        network: Network,
        *,
        nodes: int,
        settings: Mapping[str, object],
        disks: bool = False,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self._folder = folder
        self._node_count = nodes
        self._settings = settings
        self._program = program
        self._stack = ExitStack()
        self._has_disks = disks and can_mount()
        self.network = network
        self.nodes: dict[int, TrialNode] = {}
        self.disks: dict[int, Disk] = {}
        self.etcd: EtcdServer
        self.postgres: PostgresServer

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def kafka(self) -> str:
        """The addresses of the nodes for clients."""
        return self.network.bootstrap()

    @property
    def brokers_max(self) -> int:
        """The number of brokers from which clients may fetch."""
        return len(self.nodes)

    @property
    def running(self) -> list[TrialNode]:
        """The nodes whose process is running and not paused."""
        return [node for node in self.nodes.values() if node.is_running() and not node.is_paused]

    def start(self, nodes: Iterable[int] | None = None) -> None:
        """Start nodes that are not running, at the same time."""
        down = [self.nodes[number] for number in nodes or self.nodes if not self.nodes[number].is_running()]
        if down:
            with ThreadPoolExecutor(len(down)) as pool:
                list(pool.map(TrialNode.start, down))

    def stop(self) -> None:
        """Stop all nodes cleanly, one after the other; the last ones cannot transfer leadership."""
        for node in self.nodes.values():
            node.stop()

    def pause_etcd(self, *, paused: bool) -> None:
        """Pause or resume etcd. It is never killed."""
        if self.etcd.process is not None:
            os.kill(self.etcd.process.pid, signal.SIGSTOP if paused else signal.SIGCONT)

    def run_request(self, request: Callable[[Client], Coroutine[Any, Any, T]], address: str = "") -> T:
        """Run a request with Millstream's own client, at one node if its address is given."""

        async def run() -> T:
            async with Client.connect(address or self.kafka, client_id="trial", timeout_s=_REQUEST_S_MAX) as client:
                return await request(client)

        return asyncio.run(run())

    def unhealthy_reason(self) -> str:
        """Return why the cluster is unhealthy, according to any of its nodes; empty if it is healthy."""
        for address in self.kafka.split(","):
            try:
                status = self.run_request(cluster_status, address)
            except (MillstreamError, OSError, TimeoutError) as error:
                return f"{address} does not respond: {error!r}"
            if reason := self._find_problems(status):
                return reason
        return ""

    def _find_problems(self, status: ClusterStatus) -> str:
        problems = [f"node {node.id} is {node.state} {node.reasons}" for node in status.nodes if node.state != "ready"]
        if len(status.nodes) < self._node_count:
            problems.append(f"only {len(status.nodes)} nodes are known")
        if status.controller is None:
            problems.append("there is no controller")
        unhealthy = [
            f"{partition.topic}-{partition.partition} leader {partition.leader} in sync {partition.in_sync}"
            for partition in status.troubled
        ]
        return "; ".join([*problems, *unhealthy])

    def logs(self) -> str:
        return "\n".join(f"--- node {number}\n{node.log_tail()}" for number, node in self.nodes.items())

    def _start(self) -> None:
        stack = self._stack
        stack.enter_context(self.network)
        self.etcd = stack.enter_context(self.network.etcd())
        # A process that is stopped with SIGSTOP does not handle SIGTERM.
        stack.callback(self.pause_etcd, paused=False)
        self.postgres = stack.enter_context(PostgresServer())
        self.network.connect(self.etcd, self.postgres.new_database())
        keys = self._folder / "secrets.keys"
        write_keys(keys, [SecretKey.new()])
        shared = {"cluster": uuid.uuid4().hex, "secrets-key-file": keys.absolute()}
        for number in range(1, self._node_count + 1):
            settings = {"node-id": number, **shared, **self.network.settings(number), **self._settings}
            node = self.nodes[number] = TrialNode(number, self._folder, self.network, settings, self._program)
            if self._has_disks:
                self.disks[number] = stack.enter_context(Disk(node.home))
            stack.callback(node.kill)
        self.start()


class TrialSingleNode(TrialCluster):
    """A single node that can be killed, stopped and paused."""

    def __init__(self, folder: Path, *, settings: Mapping[str, object], program: Sequence[str] = PROGRAM) -> None:
        super().__init__(folder, RelayNetwork(1), nodes=1, settings=settings, program=program)

    @property
    def kafka(self) -> str:
        """Return the node's own address; there is no relay."""
        return self.nodes[1].kafka

    def unhealthy_reason(self) -> str:
        """Return why the node does not respond; empty if it does."""
        try:
            self.run_request(lambda client: client.metadata())
        except (MillstreamError, OSError, TimeoutError) as error:
            return f"{self.kafka} gives no response: {error!r}"
        return ""

    def _start(self) -> None:
        self._stack.enter_context(self.network)
        node = self.nodes[1] = TrialNode(1, self._folder, self.network, self._settings, self._program)
        self._stack.callback(node.kill)
        self.start()
