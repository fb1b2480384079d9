"""A real `millstream serve` process for tests and trials: start, stop, kill, start again on the same ports and data.

    with Server(tmp_path / "data") as server:
        client = confluent_kafka.Producer({"bootstrap.servers": server.kafka})
        server.kill()
        server.start()

No process outlives its test: each server is its own process group, and a watcher in that group kills it as soon
as this process is gone, however it ends.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Self

from millstream.cli.local_process import ReservedPort, is_free
from millstream_testing.fork_server import ForkedProcess, fork
from millstream_testing.waiting import wait_until

READY_S_MAX = 300.0
STOP_S_MAX = 60.0
_LOG_TAIL_BYTES = 4000
_WATCH = 'read -r _; kill -9 "-$1"'


class ServerFailed(Exception):
    """The process ended or did not become ready; the message has the end of its log."""


class Server:
    """A server process. `settings` are flags of `millstream serve`, without their dashes."""

    forked = False
    """Whether a server and its gateway are forked from a process that has imported everything, which saves most of a
    start. What measures servers, or looks at their children, starts each as a user would."""

    def __init__(self, data: Path, *, settings: Mapping[str, object] | None = None, log: Path | None = None) -> None:
        self.data = data
        self.settings = dict(settings or {})
        self.log = log if log is not None else data.with_name(data.name + ".log")
        self._held = (ReservedPort(), ReservedPort())
        self.kafka, self.http = (port.address for port in self._held)
        self.start_s = 0.0
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._reap: weakref.finalize[..., Server] | None = None

    def command(self) -> Sequence[str]:
        """Return the command line; it has the same addresses at every start."""
        # Most tests would otherwise start a second Spark.
        settings = {"pipelines-spare": "off", **self.settings}
        flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        serve = [sys.executable, "-m", "millstream.cli.main", "serve", "--json", "--data", str(self.data)]
        return [*serve, "--kafka", self.kafka, "--http", self.http, *flags]

    def environment(self) -> dict[str, str]:
        """Return the variables of the process: those of this one, without Millstream's settings."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MILLSTREAM_")}
        # Files for the node's user are stored next to its data.
        return inherited | {"XDG_STATE_HOME": str(self.data.with_name(self.data.name + ".state").absolute())}

    @property
    def pid(self) -> int:
        return self._running().pid

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start, wait for the line with the addresses, and reuse them at the next start."""
        if self._process is not None:
            raise RuntimeError("the server is started already")
        started = time.monotonic()
        self.data.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = self._launch(log)
        self._watch(self._process)
        try:
            ready = json.loads(self._first_line(self._process))
        except BaseException:
            self.end()
            raise
        self.start_s = time.monotonic() - started
        self.kafka = ready["kafka"]
        self.http = ready.get("http", self.http)
        return self

    def stop(self) -> int:
        """Stop cleanly, and return the exit code."""
        process = self._running()
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            raise ServerFailed(f"did not stop within {STOP_S_MAX:g} s; its log ends with:\n{self.log_tail()}") from None
        finally:
            self.end()

    def kill(self) -> None:
        """Kill the process and all its children with SIGKILL; do nothing if none is running."""
        self.end()

    def end(self) -> None:
        """Make sure that no process is left."""
        if self._reap is not None:
            self._reap()
            self._await_free_ports()
        self._process = self._watcher = self._reap = None

    def kill_main(self) -> None:
        """Kill only the main process, so that its children have to notice; `kill` still has to follow."""
        process = self._running()
        process.kill()
        process.wait(STOP_S_MAX)

    def restart(self, *, clean: bool = True) -> Self:
        """Stop (or kill) and start again on the same ports and data."""
        if clean:
            code = self.stop()
            if code != 0:
                raise ServerFailed(f"stopped with exit code {code}; its log ends with:\n{self.log_tail()}")
        else:
            self.kill()
        return self.start()

    def metrics(self) -> str:
        """Return the page of metrics; a gateway that is busy, or has just started, has to be asked again."""
        return wait_until(self._find_metrics)

    def log_tail(self) -> str:
        if not self.log.exists():
            return ""
        return self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def _find_metrics(self) -> str:
        try:
            with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=READY_S_MAX) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            error.close()
            return ""

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes] | ForkedProcess:
        """Fork the process if the result is the same; a loader's variables and other programs need a new start."""
        command, environment = self.command(), self.environment()
        if self.forked and list(command[:3]) == [sys.executable, "-m", "millstream.cli.main"]:
            return fork(command[3:], log=log, cwd=self._folder(), environment=environment)
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=self._folder(),
            env=environment,
            process_group=0,
        )

    def _running(self) -> subprocess.Popen[bytes] | ForkedProcess:
        if self._process is None:
            raise RuntimeError("the server is not started")
        return self._process

    def _await_free_ports(self) -> None:
        """Wait for children in their own sessions, which end by themselves and hold a port until then."""
        deadline = time.monotonic() + STOP_S_MAX
        while not all(is_free("127.0.0.1", port.number) for port in self._held) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _folder(self) -> Path:
        """Return the working directory: away from any `millstream.toml` of the person who runs the tests."""
        return self.data.parent

    def _watch(self, process: subprocess.Popen[bytes] | ForkedProcess) -> None:
        read, write = os.pipe()
        try:
            self._watcher = subprocess.Popen(
                ["/bin/sh", "-c", _WATCH, "watcher", str(process.pid)],
                stdin=read,
                stdout=subprocess.DEVNULL,
                process_group=process.pid,
            )
        finally:
            os.close(read)
        self._reap = weakref.finalize(self, _reap, process, self._watcher, write)

    def _first_line(self, process: subprocess.Popen[bytes] | ForkedProcess) -> bytes:
        output = process.stdout
        if output is None:
            raise RuntimeError("the server was started without a pipe")
        deadline = time.monotonic() + READY_S_MAX
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(deadline - time.monotonic()):
                    raise ServerFailed(f"not ready within {READY_S_MAX:g} s; its log ends with:\n{self.log_tail()}")
                chunk = _read_some(output)
                if not chunk:
                    code = process.wait(STOP_S_MAX)
                    raise ServerFailed(f"exited with code {code}; its log ends with:\n{self.log_tail()}")
                line += chunk
        return line


def _read_some(output: IO[bytes]) -> bytes:
    return os.read(output.fileno(), 65536)


def _reap(process: subprocess.Popen[bytes] | ForkedProcess, watcher: subprocess.Popen[bytes], write: int) -> None:
    """Have the watcher kill the whole group, then collect both."""
    os.close(write)
    watcher.wait(STOP_S_MAX)
    process.wait(STOP_S_MAX)
    if process.stdout is not None:
        process.stdout.close()


class ServerGroup:
    """The nodes of one cluster, numbered from 1."""

    def __init__(
        self, folder: Path, etcd: str, catalog: str, *, nodes: int = 3, settings: Mapping[str, object] | None = None
    ) -> None:
        shared = {"etcd": etcd, "catalog": catalog, "cluster": uuid.uuid4().hex, **(settings or {})}
        self.nodes = {
            number: Server(folder / f"node-{number}", settings={"node-id": number, **shared})
            for number in range(1, nodes + 1)
        }

    @property
    def kafka(self) -> str:
        """The addresses of all nodes, for clients."""
        return ",".join(node.kafka for node in self.nodes.values())

    def __getitem__(self, number: int) -> Server:
        return self.nodes[number]

    def __iter__(self) -> Iterator[Server]:
        return iter(self.nodes.values())

    def start(self) -> Self:
        """Start every node that is not running, at the same time."""
        down = [node for node in self if not node.is_running()]
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            list(pool.map(Server.start, down))
        return self

    def kill(self) -> None:
        for node in self:
            node.kill()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.kill()
            raise

    def __exit__(self, *exception: object) -> None:
        self.kill()
