"""Redis Streams as a peer: XADD into one stream; its file is synced before the response, every second, or never."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Self

from benchmarks.cases import ALWAYS, INTERVAL, OS, PRODUCE, REQUESTS, Case
from benchmarks.peers.launch import PeerServer, free_port
from benchmarks.peers.pipe import MARK, Connection, Counter, PeerFailed, Session, measure, payload
from benchmarks.processes import Meter
from benchmarks.subject import PRODUCED, Measured, Numbers, PeerUnavailable, Subject
from benchmarks.throughput import flow

NAME = "redis"
_APPENDFSYNC = {ALWAYS: "always", INTERVAL: "everysec", OS: "no"}
_WINDOW, _AT_ONCE = 10_000, 500
_READ_AT_ONCE = 2000
_CLIENTS, _PIPELINE, _TOOL_STREAM = 50, 16, "tool"
_FIRST_RATE = 20_000
_TOOL_S_MAX = 120.0


def command(*parts: bytes) -> bytes:
    """Encode a command in Redis' protocol."""
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


class Stream(Session):
    def __init__(self, connection: Connection, size_bytes: int, name: str = "") -> None:
        super().__init__(connection)
        self._name = (name or uuid.uuid4().hex[:12]).encode()
        self._add = command(b"XADD", self._name, b"*", b"m", payload(size_bytes))

    def messages(self, count: int) -> bytes:
        """Return XADD commands."""
        return self._add * count

    def acknowledgements(self) -> Callable[[bytes], int]:
        """Return a counter of acknowledgements, each of which is a message id."""
        return Counter(b"$", b"-ERR").feed

    def read(self, count: int) -> Iterator[int]:
        """Read with XRANGE in chunks, each after the last id of the previous one."""
        start = b"-"
        while count > 0:
            batch_size = min(count, _READ_AT_ONCE)
            self.connection.socket.sendall(command(b"XRANGE", self._name, start, b"+", b"COUNT", b"%d" % batch_size))
            start = b"(" + self._last_id(batch_size)
            count -= batch_size
            yield batch_size

    def _last_id(self, batch_size: int) -> bytes:
        """Receive this many messages, and return the id of the last one."""
        counter, came, tail = Counter(MARK, b"-ERR"), 0, b""
        # An id, the names of fields and the message itself, twice: the last message is whole in what is kept.
        keep = 2 * len(self._add) + 200
        while came < batch_size:
            part = self.connection.receive()
            came += counter.feed(part)
            tail = (tail + part)[-keep:] if len(part) < keep else part[-keep:]
        size = len(self._add) - self._add.index(MARK)
        while len(tail) - tail.rindex(MARK) < size:
            tail += self.connection.receive()
        return bytes(re.findall(rb"\r\n(\d+-\d+)\r\n", tail)[-1])

    def delete(self) -> None:
        self.connection.socket.sendall(command(b"DEL", self._name))
        if not self.connection.receive().startswith(b":"):
            raise PeerFailed("Redis did not delete the stream")


class Redis(Subject):
    """Redis servers, one for each sync policy of the append-only file."""

    name = NAME

    def __init__(self) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            raise PeerUnavailable("redis-server is not installed")
        self._binary = binary
        output = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
        self.version = (re.findall(r"v=(\S+)", output) or ["unknown"])[0]
        self._stack = ExitStack()
        self._servers: dict[str, PeerServer] = {}
        self._tool = shutil.which("redis-benchmark")
        self._rates: dict[str, float] = {}

    def __enter__(self) -> Self:
        for flush, setting in _APPENDFSYNC.items():
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="millstream-bench-")))
            port = free_port()
            options = f"--port {port} --bind 127.0.0.1 --save --appendonly yes --appendfsync {setting}".split()
            options.insert(options.index("--save") + 1, "")
            start = [self._binary, *options, "--dir", str(folder), "--auto-aof-rewrite-percentage", "0"]
            self._servers[flush] = self._stack.enter_context(PeerServer(folder / "data", port, start, {}))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def server(self, flush: str) -> PeerServer:
        """The server that syncs in this way."""
        return self._servers[flush]

    def offers(self, case: Case) -> bool:
        """One producer with a stream, or many connections."""
        return case.plain and case.kind in (PRODUCE, REQUESTS) and case.flush in _APPENDFSYNC

    def measure(self, case: Case, seconds: float) -> Measured:
        """Measure on a new stream; with several producers by Redis' own tool, where it is installed."""
        server = self._servers[case.flush]
        if case.producers > 1 and self._tool is not None:
            return {PRODUCED: self._measure_with_tool(self._tool, case, server, seconds)}
        with ExitStack() as stack:
            connections = [stack.enter_context(closing(Connection(server.kafka))) for _ in range(case.producers)]
            streams = [Stream(connection, case.size_bytes) for connection in connections]
            measured_flow = measure(streams, case, server.pid, seconds, _WINDOW, _AT_ONCE)
            for stream in streams:
                stream.delete()
            return measured_flow

    def _measure_with_tool(self, tool: str, case: Case, server: PeerServer, seconds: float) -> Numbers:
        """Redis reads little at once from a connection, so it is with many of them that it does best."""
        count = max(int(self._rates.get(case.name, _FIRST_RATE) * seconds), _CLIENTS)
        port = server.kafka.rpartition(":")[2]
        add = ["XADD", _TOOL_STREAM, "*", "m", payload(case.size_bytes).decode()]
        run = [tool, "-p", port, "-c", str(_CLIENTS), "-P", str(_PIPELINE), "-n", str(count), "--csv", *add]
        with Meter(server.pid) as meter:
            output = subprocess.run(run, capture_output=True, text=True, check=True, timeout=_TOOL_S_MAX).stdout
        # Test, requests per second, and six columns about latencies.
        self._rates[case.name] = float(output.strip().splitlines()[-1].split(",")[-7].strip('"'))
        with closing(Connection(server.kafka)) as connection:
            Stream(connection, case.size_bytes, _TOOL_STREAM).delete()
        return flow(case, count, count / self._rates[case.name], meter)
