"""Redis Streams as a peer: XADD into one stream; its file is synced before the answer, every second, or never."""

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
from benchmarks.peers.unavailable import PeerUnavailable
from benchmarks.subject import Measured, Subject

NAME = "redis"
_APPENDFSYNC = {ALWAYS: "always", INTERVAL: "everysec", OS: "no"}
_WINDOW, _AT_ONCE = 10_000, 500
_READ_AT_ONCE = 2000


def command(*parts: bytes) -> bytes:
    """A command in Redis' protocol."""
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


class Stream(Session):
    """One stream."""

    def __init__(self, connection: Connection, size_bytes: int) -> None:
        super().__init__(connection)
        self._name = uuid.uuid4().hex[:12].encode()
        self._add = command(b"XADD", self._name, b"*", b"m", payload(size_bytes))

    def messages(self, count: int) -> bytes:
        """So many XADD."""
        return self._add * count

    def acknowledgements(self) -> Callable[[bytes], int]:
        """Each is answered with the id of the message, a text that begins with its length."""
        return Counter(b"$", b"-ERR").feed

    def read(self, count: int) -> Iterator[int]:
        """XRANGE in pieces, each from behind the last id of the one before."""
        start = b"-"
        while count > 0:
            self.connection.socket.sendall(command(b"XRANGE", self._name, start, b"+", b"COUNT", b"%d" % _READ_AT_ONCE))
            wanted = min(count, _READ_AT_ONCE)
            answer = self._answer(wanted)
            start = b"(" + re.findall(rb"\r\n(\d+-\d+)\r\n", answer)[-1]
            count -= wanted
            yield wanted

    def _answer(self, wanted: int) -> bytes:
        parts, counter, came = [], Counter(MARK, b"-ERR"), 0
        while came < wanted:
            parts.append(self.connection.receive())
            came += counter.feed(parts[-1])
        # The last message may not have come whole; each ends with the end of its text.
        size = len(self._add) - self._add.index(MARK)
        answer = b"".join(parts)
        while len(answer) - answer.rindex(MARK) < size:
            answer += self.connection.receive()
        return answer

    def delete(self) -> None:
        """Give the memory back."""
        self.connection.socket.sendall(command(b"DEL", self._name))
        if not self.connection.receive().startswith(b":"):
            raise PeerFailed("Redis did not delete the stream")


class Redis(Subject):
    """Redis with each of the ways to sync its file, as so many servers."""

    name = NAME

    def __init__(self) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            raise PeerUnavailable("redis-server is not installed")
        self._binary = binary
        told = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
        self.version = (re.findall(r"v=(\S+)", told) or ["unknown"])[0]
        self._stack = ExitStack()
        self._servers: dict[str, PeerServer] = {}

    def __enter__(self) -> Self:
        """Start them."""
        for flush, setting in _APPENDFSYNC.items():
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="millstream-bench-")))
            port = free_port()
            options = f"--port {port} --bind 127.0.0.1 --save --appendonly yes --appendfsync {setting}".split()
            options.insert(options.index("--save") + 1, "")
            start = [self._binary, *options, "--dir", str(folder), "--auto-aof-rewrite-percentage", "0"]
            self._servers[flush] = self._stack.enter_context(PeerServer(folder / "data", port, start, {}))
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop them."""
        self._stack.close()

    def offers(self, case: Case) -> bool:
        """One stream and one producer."""
        return case.plain and case.kind in (PRODUCE, REQUESTS) and case.flush in _APPENDFSYNC

    def measure(self, case: Case, seconds: float) -> Measured:
        """Measure on a new stream."""
        server = self._servers[case.flush]
        with closing(Connection(server.kafka)) as connection:
            stream = Stream(connection, case.size_bytes)
            found = measure(stream, case, server.pid, seconds, _WINDOW, _AT_ONCE)
            stream.delete()
            return found
