"""A whole cluster on this machine: etcd, PostgreSQL and nodes as children of one process in the foreground."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millstream.broker.log.folder import make_private
from millstream.cli.exit_code import CommandFailed
from millstream.cli.local_etcd import LocalEtcd, etcd_warning, find_etcd
from millstream.cli.local_postgres import LocalPostgres, find_postgres
from millstream.cli.local_process import LocalProcess, is_free
from millstream.cli.output import print_note
from millstream.core.config import ENVIRONMENT_PREFIX
from millstream.core.errors import DataFolderInUse, MillstreamError

READY_S_MAX = 90.0
STOP_S_MAX = 60.0
LOCK_S_MAX = 20.0
"""How long the children of a cluster that was killed may take to end before a new one gives up on the folder."""

_HOST = "127.0.0.1"
_PROBE_S = 0.1


class StopAsked(BaseException):
    """SIGTERM or Ctrl-C came. No error: it passes every handler on its way to the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be started."""

    nodes: int
    data: Path
    name: str
    etcd: str = ""
    catalog: str = ""
    """Addresses of servers that are there already; empty means one of our own."""
    etcd_binary: str = ""
    """The program of our own etcd; empty means the one that is found."""
    kafka_port: int = 0
    http_port: int = 0
    """Of the first node, the others count up from it; 0 picks free ports."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Further flags of `serve`, for every node."""


@dataclass(frozen=True, slots=True)
class RunningNode:
    """One node and where it is found."""

    node_id: int
    process: LocalProcess
    kafka: str
    http: str
    settings: Path
    """The file to start it again with, by hand."""

    @property
    def command(self) -> str:
        """What starts it again on its folder and addresses, when its process has ended."""
        program = ["millstream"] if shutil.which("millstream") else [sys.executable, "-m", "millstream.cli.main"]
        return shlex.join([*program, "serve", "--config", str(self.settings)])

    def described(self) -> dict[str, Any]:
        """For the line that tells programs."""
        told = {"id": self.node_id, "pid": self.process.pid, "kafka": self.kafka, "http": self.http}
        return {**told, "serve": self.command}


class LocalCluster:
    """Everything that runs. Leaving it stops the nodes first, then what they stand on."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._stack = ExitStack()
        self._lock = -1
        self.etcd = plan.etcd
        self.catalog = plan.catalog
        self.nodes: list[RunningNode] = []
        self._watched: list[LocalProcess] = []

    def __enter__(self) -> LocalCluster:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def described(self) -> dict[str, Any]:
        """What programs are told once all are ready."""
        nodes = [node.described() for node in self.nodes]
        return {"nodes": nodes, "etcd": self.etcd, "catalog": self.catalog}

    def watch(self) -> None:
        """Wait and tell of every child that ends, until none is left.

        etcd and PostgreSQL go on without any node, for those that are started again by hand.
        """
        while self._watched:
            # Leaves the child for its own object to collect.
            with suppress(ChildProcessError):
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            for process in [process for process in self._watched if process.exit_code is not None]:
                self._watched.remove(process)
                print_note(f"{process.name} has ended with exit code {process.exit_code}; its log is {process.log}")
                for node in self.nodes:
                    if node.process is process:
                        print_note(f"start it again with: {node.command}")
            if self._watched and all(node.process.exit_code is not None for node in self.nodes):
                print_note("every node has ended; what they stand on goes on until Ctrl-C")
        raise CommandFailed("every node has ended")

    def _tell_who_stays(self) -> None:
        """Name the nodes that others have started: they go on without what this command is about to stop."""
        if self._plan.etcd and self._plan.catalog:
            return
        for node_id, address in sessions(self.etcd, self._plan.name).items():
            if _is_listened(address):
                what = f"node {node_id} at {address} was started by hand and still runs"
                print_note(f"{what}; etcd and PostgreSQL stop under it now, so stop it too")

    def _start(self) -> None:
        program = None
        if not self.etcd:
            # Before anything is made: without the programs there is nothing to start.
            program = find_etcd(self._plan.etcd_binary)
            if (warning := etcd_warning(program)) is not None:
                print_note(f"warning: {warning}")
        if not self.catalog:
            find_postgres()
        self._plan.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_private(self._plan.data)
        self._lock = self._stack.enter_context(_locked(self._plan.data))
        if not self.etcd:
            etcd = LocalEtcd(self._plan.data / "etcd", keep=(self._lock,))
            etcd.program = program
            self._stack.enter_context(etcd)
            self.etcd = etcd.url
            self._note(etcd.process)
        if not self.catalog:
            postgres = self._stack.enter_context(LocalPostgres(self._plan.data / "postgres", keep=(self._lock,)))
            self.catalog = postgres.url
            self._note(postgres.process)
        self._stack.callback(self._tell_who_stays)
        processes = {number: self._node(number) for number in range(1, self._plan.nodes + 1)}
        self._stack.callback(_stop_together, list(processes.values()))
        for process in processes.values():
            process.start()
            self._note(process)
        for number, process in processes.items():
            ready = json.loads(process.first_line(within_s=READY_S_MAX))
            settings = self._keep_settings(number, ready)
            self.nodes.append(RunningNode(number, process, ready["kafka"], ready["http"], settings))

    def _note(self, process: LocalProcess | None) -> None:
        if process is not None:
            self._watched.append(process)

    def _flags(self, number: int) -> dict[str, object]:
        return {
            "data": self._plan.data / f"node-{number}",
            "node-id": number,
            "kafka": f"{_HOST}:{_port(self._plan.kafka_port, number)}",
            "http": f"{_HOST}:{_port(self._plan.http_port, number)}",
            "advertise": "",
            "cluster": self._plan.name,
            **self._plan.settings,
        }

    def _keep_settings(self, number: int, ready: Mapping[str, str]) -> Path:
        """Write down what a node runs with, addresses and passwords included, for starting it again by hand."""
        shared = {"etcd": self.etcd, "catalog": self.catalog}
        values = self._flags(number) | shared | {"kafka": ready["kafka"], "http": ready["http"]}
        path = self._plan.data / f"node-{number}.toml"
        path.touch(mode=0o600)
        # What JSON writes as a string, TOML reads as the same string.
        path.write_text("".join(f"{name} = {json.dumps(str(value))}\n" for name, value in values.items()))
        return path

    def _node(self, number: int) -> LocalProcess:
        flags = self._flags(number)
        serve = [sys.executable, "-m", "millstream.cli.main", "serve", "--json"]
        command = [*serve, *(f"--{name}={value}" for name, value in flags.items())]
        log = self._plan.data / f"node-{number}.log"
        # Not as flags, which every user of the machine can see: there may be passwords in them.
        addresses = {f"{ENVIRONMENT_PREFIX}ETCD": self.etcd, f"{ENVIRONMENT_PREFIX}CATALOG": self.catalog}
        return LocalProcess(
            f"node {number}", command, log=log, environment=os.environ | addresses, piped=True, keep=(self._lock,)
        )


def sessions(etcd: str, cluster: str) -> dict[int, str]:
    """The nodes that etcd knows as running, with their addresses; none if it gives no answer."""
    from millstream.broker.cluster import keys
    from millstream.broker.cluster.etcd_address import EtcdAddress
    from millstream.broker.cluster.etcd_store import EtcdStore
    from millstream.broker.cluster.told import Registered
    from millstream.core.clock import SystemClock
    from millstream.core.ids import NodeId

    async def read() -> dict[int, str]:
        store = EtcdStore(EtcdAddress.parse(etcd), cluster, SystemClock(), request_s_max=1.0)
        try:
            entries = (await store.read(keys.NODES)).entries
        finally:
            await store.close()
        found = {}
        for key, entry in entries.items():
            node = Registered.from_json(NodeId(int(key.removeprefix(keys.NODES))), entry.value, 0).node
            found[int(node.node_id)] = f"{node.host}:{node.port}"
        return found

    try:
        return asyncio.run(read())
    except MillstreamError:
        return {}


def _is_listened(address: str) -> bool:
    """Whether somebody is there: a node that was killed is known to etcd for a while longer."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=1):
            return True
    except OSError:
        return False


def first_port(wanted: int, nodes: int) -> int:
    """The port wanted for the first of some nodes, if all that follow are free as well; else 0, for any."""
    return wanted if all(is_free(_HOST, wanted + at) for at in range(nodes)) else 0


@contextmanager
def stop_by_signal() -> Iterator[None]:
    """Turn SIGTERM and Ctrl-C into `StopAsked`, once; a second one does not cut the stopping short."""

    def stop(_number: int, _frame: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        raise StopAsked

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Hold a folder for this process and the children that get the handle, until the last of them has ended."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + LOCK_S_MAX
        while not _lock(handle):
            if time.monotonic() > deadline:
                raise DataFolderInUse(f"a cluster runs on {folder} already; stop it first, or choose another --data")
            time.sleep(_PROBE_S)
        yield handle
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _stop_together(processes: list[LocalProcess]) -> None:
    """Have all nodes stop at the same time, and wait for each."""
    running = [process for process in processes if process.exit_code is None]
    for process in running:
        process.ask_to_end()
    deadline = time.monotonic() + STOP_S_MAX
    for process in running:
        code = process.stop(within_s=max(0.0, deadline - time.monotonic()))
        if code not in (0, None):
            print_note(f"{process.name} stopped with exit code {code}; its log is {process.log}")


def _port(base: int, number: int) -> int:
    return base + number - 1 if base else 0
