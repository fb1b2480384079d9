"""A client for servers that do not speak Kafka's protocol: prepared bytes out, responses counted as they come in.

It costs less than any client library: what is sent is made once, many messages at a time, and responses are not parsed
but counted. So it is the server that is measured. There are always some messages in flight, as with librdkafka.
"""

from __future__ import annotations

import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

from benchmarks.cases import REQUESTS, Case
from benchmarks.percentiles import percentile
from benchmarks.processes import Meter
from benchmarks.requests import IN_FLIGHT, ONE_BY_ONE, WINDOW
from benchmarks.subject import CONSUMED, PRODUCED, Measured, Numbers
from benchmarks.throughput import flow

# Below what the allocator takes from the system and gives back each time, which would cost more than receiving.
RECEIVE_BYTES = 96 * 1024
BUFFER_BYTES = 1 << 20
MARK = b"~mark~"
"""Starts each message and occurs nowhere else, so that messages can be counted in any stream of bytes."""
_TIMEOUT_S = 60.0
_FILL_S, _FILL_S_MAX = 0.5, 2.0
# These clients receive nothing before they are asked to count it, so that a part of what others read is enough.
_READ_SHARE = 3


class PeerFailed(Exception):
    """The server responded with an error, or not at all."""


def payload(size_bytes: int) -> bytes:
    return (MARK + b"0123456789abcdef" * (size_bytes // 16 + 1))[:size_bytes]


class Counter:
    """Counts a pattern in received bytes."""

    def __init__(self, pattern: bytes, failure: bytes | None = None) -> None:
        self._pattern = pattern
        self._failure = failure
        self._tail = b""

    def feed(self, data: bytes) -> int:
        """Return how often the pattern ends in these bytes."""
        whole = self._tail + data
        keep = len(self._pattern) - 1
        self._tail = whole[-keep:] if keep else b""
        if self._failure is not None and self._failure in whole:
            raise PeerFailed(whole[whole.index(self._failure) :][:200].decode(errors="replace"))
        return whole.count(self._pattern)


class Tally:
    """Counts a pattern in everything that a connection receives, without creating objects."""

    def __init__(self, pattern: bytes) -> None:
        self._pattern = pattern
        self._keep = len(pattern) - 1
        self._buffer = bytearray(self._keep + BUFFER_BYTES)
        self._view = memoryview(self._buffer)

    def take(self, connection: Connection) -> int:
        """Receive once, and return how often the pattern ended in it."""
        received = connection.socket.recv_into(self._view[self._keep :])
        if not received:
            raise PeerFailed("the server closed the connection")
        end = self._keep + received
        count = self._buffer.count(self._pattern, 0, end)
        # What may be the beginning of a pattern goes before the next bytes.
        self._view[: self._keep] = bytes(self._view[end - self._keep : end])
        return count


class Connection:
    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=_TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive(self) -> bytes:
        data = self.socket.recv(RECEIVE_BYTES)
        if not data:
            raise PeerFailed("the server closed the connection")
        return data

    def close(self) -> None:
        self.socket.close()


class Session(ABC):
    """One topic, stream or queue of a server: how to write into it and to read from it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    @abstractmethod
    def messages(self, count: int) -> bytes:
        """Return the bytes that publish this many messages."""

    @abstractmethod
    def acknowledgements(self) -> Callable[[bytes], int]:
        """Return a function that counts acknowledgements in received bytes."""

    @abstractmethod
    def read(self, count: int) -> Iterator[int]:
        """Read this many messages from the start; yield the number of messages as they arrive."""


class Window:
    """Limits the number of unacknowledged messages; the sender waits while there are too many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        self.sent = 0
        self.acknowledged = 0
        self.failure: Exception | None = None

    def send(self, count: int) -> None:
        """Wait until this many more may be sent."""
        with self._changed:
            self._wait(lambda: self.sent + count - self.acknowledged <= self._most)
            self.sent += count

    def acknowledge(self, count: int) -> None:
        with self._changed:
            self.acknowledged += count
            self._changed.notify()

    def fail(self, failure: Exception) -> None:
        """Record that there will be no more responses."""
        with self._changed:
            self.failure = failure
            self._changed.notify()

    def finish(self) -> None:
        """Wait until everything is acknowledged."""
        with self._changed:
            self._wait(lambda: self.acknowledged >= self.sent)

    def _wait(self, done: Callable[[], bool]) -> None:
        if not self._changed.wait_for(lambda: done() or self.failure is not None, _TIMEOUT_S):
            raise PeerFailed(f"{self.sent - self.acknowledged} messages were not acknowledged")
        if self.failure is not None:
            raise self.failure


@contextmanager
def _acknowledging(session: Session, window: Window) -> Iterator[None]:
    """Count responses in a thread."""
    stop = threading.Event()

    def listen() -> None:
        count = session.acknowledgements()
        try:
            while not (stop.is_set() and window.acknowledged >= window.sent):
                window.acknowledge(count(session.connection.receive()))
        except Exception as failure:
            window.fail(failure)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
        # One more, since the thread waits for a response before it looks whether to stop.
        window.send(1)
        stop.set()
        session.connection.socket.sendall(session.messages(1))
    finally:
        thread.join(_TIMEOUT_S)


def measure(sessions: Sequence[Session], case: Case, pid: int, seconds: float, window: int, at_once: int) -> Measured:
    """The same that is measured with librdkafka: at the highest rate, or requests one by one.

    Each session is a producer with its own connection. Only a single one reads back what it wrote.
    """
    first = sessions[0]
    if case.kind == REQUESTS:
        return _requests(first, pid, seconds)
    sent, produced = _produce(sessions, case, pid, seconds, window, at_once)
    flows = {PRODUCED: produced}
    if case.consumes and len(sessions) == 1:
        goal = case.messages_to_read(seconds) // _READ_SHARE
        deadline = time.monotonic() + _FILL_S_MAX
        while sent < goal and time.monotonic() < deadline:
            sent += _produce(sessions, case, pid, _FILL_S, window, at_once)[0]
        flows[CONSUMED] = _consume(first, case, pid, min(sent, goal))
    return flows


def _produce(
    sessions: Sequence[Session], case: Case, pid: int, seconds: float, window: int, at_once: int
) -> tuple[int, Numbers]:
    """Return the total number of sent messages, and the results for those that were measured."""
    windows = [Window(window // len(sessions)) for _ in sessions]
    chunks = [session.messages(at_once) for session in sessions]
    with ExitStack() as stack:
        for session, flying in zip(sessions, windows, strict=True):
            stack.enter_context(_acknowledging(session, flying))
        pool = stack.enter_context(ThreadPoolExecutor(len(sessions)))
        senders = [partial(_send, *session, at_once) for session in zip(sessions, windows, chunks, strict=True)]
        for done in [pool.submit(sender, 0.0) for sender in senders]:
            done.result()
        with Meter(pid) as meter:
            began = time.perf_counter()
            messages = sum(done.result() for done in [pool.submit(sender, seconds) for sender in senders])
            elapsed = time.perf_counter() - began
    return sum(flying.sent for flying in windows), flow(case, messages, elapsed, meter)


def _send(session: Session, flying: Window, chunk: bytes, at_once: int, seconds: float) -> int:
    """Send for some seconds, at least once, and wait for the responses; return the number of messages."""
    deadline, before = time.perf_counter() + seconds, flying.sent
    while flying.sent == before or time.perf_counter() < deadline:
        flying.send(at_once)
        session.connection.socket.sendall(chunk)
    flying.finish()
    return flying.sent - before


def _consume(session: Session, case: Case, pid: int, goal: int) -> Numbers:
    reading = session.read(goal)
    first = next(reading)
    with Meter(pid) as meter:
        began = time.perf_counter()
        came = sum(reading)
        elapsed = time.perf_counter() - began
    if first + came < goal:
        raise PeerFailed(f"{first + came} of {goal} messages came back")
    return flow(case, came, elapsed, meter)


def _requests(session: Session, pid: int, seconds: float) -> Measured:
    message = session.messages(1)
    count = session.acknowledgements()

    def exchange(request: bytes, responses: int) -> None:
        session.connection.socket.sendall(request)
        while responses > 0:
            responses -= count(session.connection.receive())

    for _ in range(200):
        exchange(message, 1)
    times_ms = []
    with Meter(pid) as alone:
        deadline = time.perf_counter() + seconds
        while (began := time.perf_counter()) < deadline:
            exchange(message, 1)
            times_ms.append((time.perf_counter() - began) * 1000)
    pipelined = 0
    with Meter(pid) as meter:
        began = time.perf_counter()
        while time.perf_counter() < began + seconds:
            exchange(message * WINDOW, WINDOW)
            pipelined += WINDOW
        elapsed = time.perf_counter() - began
    return {
        ONE_BY_ONE: {
            "p50 ms": percentile(times_ms, 50),
            "p99 ms": percentile(times_ms, 99),
            "requests/s": len(times_ms) / seconds,
            "CPU µs/request": sum(alone.cpu) / len(times_ms) * 1e6,
        },
        IN_FLIGHT: {"requests/s": pipelined / elapsed, "CPU µs/request": sum(meter.cpu) / pipelined * 1e6},
    }
