"""Send frames in arbitrary pieces to a connection: each whole frame must be served once, with responses in order.

    python -m trials.fuzz_framing --seconds 60

An example is a real connection over a socket pair, next to a second one. Random frames, some larger than any buffer,
are sent in random pieces to a service that responds at once, later or never, and responses are read in random pieces,
fast or slowly. At the end the stream may be truncated, or continue with an invalid length. The service must have seen
exactly the whole frames; the responses must be in order, and complete when the stream ended cleanly; every byte counted
against the budget must be released; and the other connection must be served.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import sys
import zlib
from collections.abc import Coroutine

import uvloop
from trials.fuzz_trial import Finding, collect_logs, run

from millstream.broker.net.budget import Budget
from millstream.broker.net.connection import Buffers, Connection, ConnectionLimits, EventualResponse, Traffic
from millstream.broker.net.turns import Turns

FRAME_BYTES_MAX = 6 * 1024 * 1024
_LENGTH = struct.Struct(">i")
_HEAD = struct.Struct(">IBI")
AT_ONCE, PROMISED, WAITED, SILENT = range(4)
_BAD_LENGTHS = (0, -1, -(2**31), FRAME_BYTES_MAX + 1, 2**31 - 1, int.from_bytes(b"GET "))
_PROBE = _LENGTH.pack(_HEAD.size) + _HEAD.pack(0, AT_ONCE, 1)


class Echo:
    """Responds to a frame with its number and checksum, repeated and delayed as the frame requests."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def handle(self, frame: memoryview, connection: Connection) -> EventualResponse:
        _, kind, _ = _HEAD.unpack_from(frame)
        self.seen.append(zlib.crc32(frame))
        response = reply_to(frame)
        if kind == AT_ONCE:
            return response
        if kind == PROMISED:
            return _promise(response)
        return _wait(response) if kind == WAITED else None


def reply_to(frame: bytes | memoryview) -> Buffers:
    number, _, times = _HEAD.unpack_from(frame)
    body = struct.pack(">II", number, zlib.crc32(frame)) * times
    return [_LENGTH.pack(len(body)), body]


def _promise(response: Buffers) -> asyncio.Future[Buffers | None]:
    loop = asyncio.get_running_loop()
    promise: asyncio.Future[Buffers | None] = loop.create_future()
    loop.call_soon(promise.set_result, response)
    return promise


def _wait(response: Buffers) -> Coroutine[None, None, Buffers | None]:
    async def wait() -> Buffers | None:
        await asyncio.sleep(0)
        return response

    return wait()


def random_frame(rng: random.Random, number: int) -> bytes:
    """Return a frame of any size, usually a small one."""
    size = rng.choice((0, 1, 30, 300, 3_000, 130_000, 300_000))
    if rng.random() < 0.03:
        size = rng.choice((2 * 1024 * 1024, 3_000_000, FRAME_BYTES_MAX - _HEAD.size))
    size = max(0, size - rng.randrange(5))
    times = rng.choice((1, 1, 1, 10, 1000, 100_000 if rng.random() < 0.2 else 1))
    return _HEAD.pack(number, rng.randrange(4), times) + rng.randbytes(min(size, 4096)).ljust(size, b"\x7f")


def random_pieces(rng: random.Random, stream: bytes) -> list[bytes]:
    """Split the stream at random positions."""
    mean = rng.choice((3, 50, 1_000, 50_000, 1_000_000))
    pieces: list[bytes] = []
    at = 0
    # The number of tiny pieces is limited, or a large frame would take minutes.
    while at < len(stream):
        size = rng.randint(1, 2 * mean) if len(pieces) < 2000 else len(stream)
        pieces.append(stream[at : at + size])
        at += size
    return pieces


class _Pair:
    """A connection of the broker, and the client's end of it."""

    def __init__(self, service: Echo, budget: Budget) -> None:
        self.client, self._server = socket.socketpair()
        self.client.setblocking(False)
        self._server.setblocking(False)
        self.lost = asyncio.Event()
        self._service = service
        self._budget = budget

    async def open(self) -> None:
        limits = ConnectionLimits(frame_bytes_max=FRAME_BYTES_MAX)
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: Connection(self._service, limits, self._budget, Traffic(), lambda _: self.lost.set(), Turns()),
            self._server,
        )

    async def send(self, pieces: list[bytes], *, end: bool) -> None:
        loop = asyncio.get_running_loop()
        try:
            for piece in pieces:
                await loop.sock_sendall(self.client, piece)
            if end:
                self.client.shutdown(socket.SHUT_WR)
        except OSError:
            return  # The broker closed the connection, which is allowed after invalid input.

    async def receive(self, rng: random.Random) -> bytes:
        """Read everything up to the end, in random pieces."""
        loop = asyncio.get_running_loop()
        size, slow, received = rng.choice((7, 1000, 1 << 20)), rng.random() < 0.2, bytearray()
        while True:
            try:
                piece = await loop.sock_recv(self.client, size if len(received) < 20_000 else 1 << 20)
            except ConnectionError:
                return bytes(received)
            if not piece:
                return bytes(received)
            received += piece
            if slow:
                await asyncio.sleep(0.0005)


async def _example(rng: random.Random) -> int:
    frames = [random_frame(rng, number) for number in range(rng.choice((1, 5, 30, 200)))]
    stream = b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames)
    ending = rng.choice(("well", "well", "cut", "bad"))
    whole = len(frames)
    if ending == "cut":
        at = rng.randrange(len(stream))
        whole = _whole_frames(stream[:at])
        stream = stream[:at]
    elif ending == "bad":
        stream += _LENGTH.pack(rng.choice(_BAD_LENGTHS)) + rng.randbytes(rng.randrange(100))
    budget = Budget(rng.choice((1024 * 1024, 64 * 1024 * 1024)))
    service, other = Echo(), Echo()
    first, second = _Pair(service, budget), _Pair(other, budget)
    await first.open()
    await second.open()
    _, received = await asyncio.gather(first.send(random_pieces(rng, stream), end=ending != "bad"), first.receive(rng))
    await first.lost.wait()
    first.client.close()
    _compare(frames[:whole], service.seen, received, complete=ending == "well")
    await _probe(second, budget)
    return whole


def _whole_frames(stream: bytes) -> int:
    count = at = 0
    while at + _LENGTH.size <= len(stream):
        at += _LENGTH.size + _LENGTH.unpack_from(stream, at)[0]
        count += at <= len(stream)
    return count


def _compare(frames: list[bytes], seen: list[int], received: bytes, *, complete: bool) -> None:
    expected = [zlib.crc32(frame) for frame in frames]
    if seen != expected[: len(seen)] or (complete and len(seen) != len(frames)):
        raise Finding(f"{len(seen)} frames were served, {len(frames)} sent, or their contents differ")
    responses = b"".join(bytes(b"".join(reply_to(frame))) for frame in frames if frame[4] != SILENT)
    if not responses.startswith(received) or (complete and received != responses):
        raise Finding(
            f"{len(received)} bytes of responses came, {len(responses)} were expected, or their contents differ"
        )


async def _probe(other: _Pair, budget: Budget) -> None:
    """Check that the other connection is served and that no bytes are counted as held."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(other.client, _PROBE)
    if len(await loop.sock_recv(other.client, 100)) != 12:
        raise Finding("the other connection was not served")
    other.client.close()
    await other.lost.wait()
    await asyncio.sleep(0)
    if budget.used_bytes or budget.waiting:
        raise Finding(f"{budget.used_bytes} bytes are still counted as held, {budget.waiting} wait for room")


def main() -> int:
    collected = collect_logs()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        def example(rng: random.Random) -> int:
            tried = runner.run(_example(rng))
            collected.check()
            return tried

        return run("trials.fuzz_framing", example)


if __name__ == "__main__":
    sys.exit(main())
