"""RabbitMQ streams as a peer, by their own binary protocol: one stream, acknowledged once it is in the page cache."""

from __future__ import annotations

import shutil
import struct
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Self

from benchmarks.cases import OS, PRODUCE, REQUESTS, Case
from benchmarks.peers.launch import PeerServer, free_port
from benchmarks.peers.pipe import MARK, Connection, PeerFailed, Session, Tally, measure, payload
from benchmarks.subject import Measured, PeerUnavailable, Subject

NAME = "rabbitmq"
# The script that Debian puts on the PATH changes the user; this is the one behind it.
_PLACES = ("/usr/lib/rabbitmq/bin/rabbitmq-server",)
_WINDOW, _AT_ONCE = 10_000, 250
_CREDIT = 60_000
_DECLARE_PUBLISHER, _PUBLISH, _CONFIRM, _PUBLISH_ERROR, _SUBSCRIBE = 1, 2, 3, 4, 7
_CREATE, _DELETE, _PROPERTIES, _MECHANISMS, _AUTHENTICATE, _TUNE, _OPEN = 13, 14, 17, 18, 19, 20, 21
_OK = 1
_HEAD = struct.Struct(">IHH")
_FIRST = 1


def text(value: str) -> bytes:
    """Encode a string."""
    return struct.pack(">h", len(value)) + value.encode()


def frame(key: int, body: bytes) -> bytes:
    """Encode a frame in version 1."""
    return _HEAD.pack(4 + len(body), key, 1) + body


def _property(response: bytes, name: str) -> str:
    """Return one of the server's properties, which are pairs of strings."""
    value = response.partition(text(name))[2]
    return value[2 : 2 + struct.unpack_from(">h", value)[0]].decode() if value else "unknown"


class Frames:
    """Splits received bytes into frames."""

    def __init__(self) -> None:
        self._left = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the key and the body of each complete frame."""
        self._left += data
        at = 0
        while len(self._left) - at >= _HEAD.size:
            size, key, _ = _HEAD.unpack_from(self._left, at)
            end = at + 4 + size
            if len(self._left) < end:
                break
            yield key, self._left[at + _HEAD.size : end]
            at = end
        self._left = self._left[at:]


class Control:
    """An authenticated connection for requests."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._frames = Frames()
        self._waiting: list[tuple[int, bytes]] = []
        self.version = _property(self.ask(_PROPERTIES, struct.pack(">I", 0)), "version")
        self.ask(_MECHANISMS, b"")
        secret = b"\0guest\0guest"
        self.ask(_AUTHENTICATE, text("PLAIN") + struct.pack(">I", len(secret)) + secret)
        connection.socket.sendall(frame(_TUNE, self._next(_TUNE)))
        self.ask(_OPEN, text("/"))

    def ask(self, key: int, body: bytes) -> bytes:
        """Send one request and return its response."""
        self._connection.socket.sendall(frame(key, struct.pack(">I", 1) + body))
        response = self._next(key | 0x8000)
        (code,) = struct.unpack_from(">H", response, 4)
        if code != _OK:
            raise PeerFailed(f"RabbitMQ returned {code} to request {key}")
        return response

    def _next(self, key: int) -> bytes:
        """Return the next frame with a key; earlier frames are dropped, later bytes are kept."""
        while True:
            while self._waiting:
                kind, body = self._waiting.pop(0)
                if kind == key:
                    return body
            self._waiting += self._frames.feed(self._connection.receive())


class Stream(Session):
    """One stream, and one connection to write to it and read from it."""

    def __init__(self, connection: Connection, size_bytes: int) -> None:
        super().__init__(connection)
        self.name = uuid.uuid4().hex[:12]
        self._text = payload(size_bytes)
        control = Control(connection)
        control.ask(_CREATE, text(self.name) + struct.pack(">I", 0))
        control.ask(_DECLARE_PUBLISHER, b"\x01" + text("") + text(self.name))

    def messages(self, count: int) -> bytes:
        """Return one frame with this many messages; their ids are irrelevant here."""
        encoded = struct.pack(">I", len(self._text)) + self._text
        body = b"".join(struct.pack(">Q", number) + encoded for number in range(count))
        return frame(_PUBLISH, b"\x01" + struct.pack(">I", count) + body)

    def acknowledgements(self) -> Callable[[bytes], int]:
        """Return a counter of acknowledgements; a frame contains the ids of many messages."""
        frames = Frames()

        def feed(data: bytes) -> int:
            count = 0
            for key, body in frames.feed(data):
                if key == _PUBLISH_ERROR:
                    raise PeerFailed(f"RabbitMQ refused messages: {body[:40].hex()}")
                if key == _CONFIRM:
                    count += struct.unpack_from(">I", body, 1)[0]
            return count

        return feed

    def read(self, count: int) -> Iterator[int]:
        """Subscribe from the first message, with enough credit that only the socket limits the server."""
        start = struct.pack(">HH", _FIRST, _CREDIT)
        self.connection.socket.sendall(
            frame(_SUBSCRIBE, struct.pack(">I", 1) + b"\x01" + text(self.name) + start + struct.pack(">I", 0))
        )
        tally, came = Tally(MARK), 0
        while came < count:
            now = tally.take(self.connection)
            came += now
            yield now


class RabbitMq(Subject):
    """A RabbitMQ node with only the stream plugin."""

    name = NAME

    def __init__(self) -> None:
        binary = next((path for path in _PLACES if Path(path).exists()), shutil.which("rabbitmq-server"))
        if binary is None or shutil.which("epmd") is None:
            raise PeerUnavailable("rabbitmq-server is not installed")
        self._binary = binary
        self._stack = ExitStack()
        self._server: PeerServer
        self.amqp = ""
        """The address at which it listens for AMQP."""

    @property
    def server(self) -> PeerServer:
        return self._server

    def __enter__(self) -> Self:
        """Start the node with its own epmd, which ends with it."""
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="millstream-bench-")))
        port, names, amqp = free_port(), free_port(), free_port()
        self.amqp = f"127.0.0.1:{amqp}"
        (folder / "plugins").write_text("[rabbitmq_stream].\n")
        (folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.local = {self.amqp}\nstream.listeners.tcp.local = 127.0.0.1:{port}\n"
            "log.console = true\nlog.console.level = warning\nlog.file = false\n"
        )
        environment = {
            "HOME": str(folder),
            "ERL_EPMD_PORT": str(names),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"bench{port}@localhost",
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        }
        start = ["/bin/sh", "-c", f"epmd -port {names} & exec {self._binary}"]
        try:
            self._server = self._stack.enter_context(PeerServer(folder / "data", port, start, environment))
            with closing(Connection(self._server.kafka)) as connection:
                self.version = Control(connection).version
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def offers(self, case: Case) -> bool:
        """A stream for each producer; RabbitMQ never syncs a stream before it acknowledges."""
        return case.plain and case.kind in (PRODUCE, REQUESTS) and case.flush == OS

    def measure(self, case: Case, seconds: float) -> Measured:
        """Measure on new streams, one for each producer."""
        with ExitStack() as stack:
            connections = [stack.enter_context(closing(Connection(self._server.kafka))) for _ in range(case.producers)]
            streams = [Stream(connection, case.size_bytes) for connection in connections]
            flow = measure(streams, case, self._server.pid, seconds, _WINDOW, _AT_ONCE)
        # On another connection, since unread messages may still be on their way.
        with closing(Connection(self._server.kafka)) as connection:
            control = Control(connection)
            for stream in streams:
                control.ask(_DELETE, text(stream.name))
        return flow
