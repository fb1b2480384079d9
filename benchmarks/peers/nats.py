"""NATS JetStream as a peer: one file-backed stream, synced before each acknowledgement or every two minutes.

Where Go is installed, the server is built from its public module, pinned below, into a cache folder of the user; else
a `nats-server` on the PATH is used. Versions before 2.10 cannot sync before they acknowledge.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Self

from benchmarks.cases import ALWAYS, OS, PRODUCE, REQUESTS, Case
from benchmarks.peers.launch import PeerServer, free_port
from benchmarks.peers.pipe import MARK, Connection, Counter, PeerFailed, Session, Tally, measure, payload
from benchmarks.subject import Measured, PeerUnavailable, Subject

NAME = "nats"
VERSION = "v2.15.2"
BUILD_S_MAX = 600.0
_SYNC = {ALWAYS: "sync_interval: always", OS: ""}
_DURABILITY = {OS: "page cache, fsync every 2 min"}
# How many messages are in flight, and sent at once. The server drops what comes when more than 10,000 wait to be
# stored; it syncs for each message alone, so that more of them in flight would only take longer to come to an end.
_FLIGHT = {ALWAYS: (500, 20), OS: (4000, 250)}
_READ_AT_ONCE = 5000


def fetch() -> Path:
    """Return the path of the server's program."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millstream-bench" / f"nats-{VERSION}"
    binary = cache / "nats-server"
    if not binary.exists() and (go := shutil.which("go")) is not None:
        build = [go, "install", f"github.com/nats-io/nats-server/v2@{VERSION}"]
        try:
            subprocess.run(
                build, env={**os.environ, "GOBIN": str(cache)}, capture_output=True, check=True, timeout=BUILD_S_MAX
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            binary = Path(shutil.which("nats-server") or binary)
    elif not binary.exists():
        binary = Path(shutil.which("nats-server") or binary)
    if not binary.exists():
        raise PeerUnavailable("nats-server is not installed, and could not be built with Go")
    return binary


class Stream(Session):
    def __init__(self, connection: Connection, size_bytes: int) -> None:
        super().__init__(connection)
        self._name = "B" + uuid.uuid4().hex[:12]
        self._inbox = f"_INBOX.{self._name}"
        connection.receive()
        hello = {"verbose": False, "pedantic": False, "headers": True, "lang": "bench", "version": "1", "protocol": 1}
        connection.socket.sendall(b"CONNECT %b\r\nSUB %b.* 1\r\n" % (json.dumps(hello).encode(), self._inbox.encode()))
        settings = {"name": self._name, "subjects": [self._name], "storage": "file", "num_replicas": 1}
        self._ask(f"STREAM.CREATE.{self._name}", settings)
        text = payload(size_bytes)
        self._publish = b"PUB %b %b.a %d\r\n%b\r\n" % (self._name.encode(), self._inbox.encode(), len(text), text)

    def _ask(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send one request to JetStream's API."""
        text = json.dumps(body).encode()
        self.connection.socket.sendall(
            b"PUB $JS.API.%b %b.r %d\r\n%b\r\n" % (what.encode(), self._inbox.encode(), len(text), text)
        )
        output: dict[str, Any] = json.loads(self._read_response())
        if "error" in output:
            raise PeerFailed(str(output["error"]))
        return output

    def _read_response(self) -> bytes:
        """Return the next message to the reply subject; others are dropped."""
        came = b""
        while True:
            came += self.connection.receive()
            head = re.search(rb"MSG \S+\.r 1 (?:\S+ )?(\d+)\r\n", came)
            if head is not None and len(came) >= head.end() + int(head[1]):
                return came[head.end() : head.end() + int(head[1])]

    def messages(self, count: int) -> bytes:
        """Return PUB commands with a reply subject."""
        return self._publish * count

    def acknowledgements(self) -> Callable[[bytes], int]:
        """Each is a small JSON object."""
        return Counter(b"}", b'"error"').feed

    def read(self, count: int) -> Iterator[int]:
        """Pull batches from a consumer without acknowledgements; the next is requested before the last has arrived."""
        config = {"ack_policy": "none", "deliver_policy": "all", "mem_storage": True, "max_waiting": 16}
        made = self._ask(f"CONSUMER.CREATE.{self._name}", {"stream_name": self._name, "config": config})
        body = json.dumps({"batch": _READ_AT_ONCE, "expires": 30_000_000_000}).encode()
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._name}.{made['name']}".encode()
        pull = b"PUB %b %b.m %d\r\n%b\r\n" % (subject, self._inbox.encode(), len(body), body)
        asked, came = 0, 0
        tally = Tally(MARK)
        while came < count:
            while asked < count and asked - came <= 2 * _READ_AT_ONCE:
                self.connection.socket.sendall(pull)
                asked += _READ_AT_ONCE
            now = tally.take(self.connection)
            came += now
            yield now

    def delete(self) -> None:
        """Remove the stream's files."""
        self._ask(f"STREAM.DELETE.{self._name}", {})


class Nats(Subject):
    """Two NATS servers, one for each sync policy."""

    name = NAME

    def __init__(self) -> None:
        self._binary = fetch()
        output = subprocess.run([self._binary, "--version"], capture_output=True, text=True, check=True).stdout
        self.version = (re.findall(r"v(\d\S+)", output) or ["unknown"])[0]
        self._stack = ExitStack()
        self._servers: dict[str, PeerServer] = {}

    def __enter__(self) -> Self:
        """Start both."""
        for flush, sync in _SYNC.items():
            if flush == ALWAYS and tuple(map(int, self.version.split(".")[:2])) < (2, 10):
                continue
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="millstream-bench-")))
            port = free_port()
            settings = folder / "nats.conf"
            settings.write_text(f"listen: 127.0.0.1:{port}\njetstream {{ store_dir: {folder / 'store'}\n {sync} }}\n")
            start = [str(self._binary), "--config", str(settings)]
            self._servers[flush] = self._stack.enter_context(PeerServer(folder / "data", port, start, {}))
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop both."""
        self._stack.close()

    def server(self, flush: str) -> PeerServer | None:
        """Return the server with this sync policy, if it is supported."""
        return self._servers.get(flush)

    def offers(self, case: Case) -> bool:
        """A stream for each producer."""
        return case.plain and case.kind in (PRODUCE, REQUESTS) and case.flush in self._servers

    def durability(self, case: Case) -> str:
        """Describe the durability, which is weak with the default setting."""
        return _DURABILITY.get(case.flush, case.durability)

    def measure(self, case: Case, seconds: float) -> Measured:
        """Measure on new streams, one for each producer."""
        server = self._servers[case.flush]
        with ExitStack() as stack:
            connections = [stack.enter_context(closing(Connection(server.kafka))) for _ in range(case.producers)]
            streams = [Stream(connection, case.size_bytes) for connection in connections]
            flow = measure(streams, case, server.pid, seconds, *_FLIGHT[case.flush])
            for stream in streams:
                stream.delete()
            return flow
