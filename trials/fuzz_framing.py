"""Send frames in arbitrary pieces to a connection: each whole frame must be served once, with responses in order.

    python -m trials.fuzz_framing --seconds 60

An example is a real connection over a socket pair and beside it another one. Random frames, some larger than any
buffer, are sent in random pieces to a service that responds at once, promises, waits or stays silent, and are read in
random pieces, fast or slow. At the end the stream may break off, or go on with a length that no frame can have. The
service must have seen just the whole frames; the responses must be those of the frames in order, all of them when the
stream ended well; every byte counted against the budget must be given back; the other connection must be served.
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
from trials.fuzz_trial import Finding, listen, run

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
    """Responds to a frame with its number and checksum, as many times over as the frame asks, in the way it asks
    for."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def handle(self, frame: memoryview, connection: Connection) -> EventualResponse:
        """Respond to one frame."""
        _, kind, _ = _HEAD.unpack_from(frame)
        self.seen.append(zlib.crc32(frame))
        response = reply_to(frame)
        if kind == AT_ONCE:
            return response
        if kind == PROMISED:
            return _promise(response)
        return _wait(response) if kind == WAITED else None


def reply_to(frame: bytes | memoryview) -> Buffers:
    """What a frame gets."""
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


def random_frame(chance: random.Random, number: int) -> bytes:
    """A frame of any size, small ones more often."""
    size = chance.choice((0, 1, 30, 300, 3_000, 130_000, 300_000))
    if chance.random() < 0.03:
        size = chance.choice((2 * 1024 * 1024, 3_000_000, FRAME_BYTES_MAX - _HEAD.size))
    size = max(0, size - chance.randrange(5))
    times = chance.choice((1, 1, 1, 10, 1000, 100_000 if chance.random() < 0.2 else 1))
    return _HEAD.pack(number, chance.randrange(4), times) + chance.randbytes(min(size, 4096)).ljust(size, b"\x7f")


def random_pieces(chance: random.Random, stream: bytes) -> list[bytes]:
    """The stream, cut somewhere."""
    mean = chance.choice((3, 50, 1_000, 50_000, 1_000_000))
    pieces: list[bytes] = []
    at = 0
    # Only so many tiny pieces, or a large frame would take minutes.
    while at < len(stream):
        size = chance.randint(1, 2 * mean) if len(pieces) < 2000 else len(stream)
        pieces.append(stream[at : at + size])
        at += size
    return pieces


class _Pair:
    """A connection of the broker and the client's end of it."""

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
            return  # The broker hung up, which it may after bad input.

    async def receive(self, chance: random.Random) -> bytes:
        """Everything up to the end, in random pieces."""
        loop = asyncio.get_running_loop()
        size, slow, received = chance.choice((7, 1000, 1 << 20)), chance.random() < 0.2, bytearray()
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


async def _example(chance: random.Random) -> int:
    frames = [random_frame(chance, number) for number in range(chance.choice((1, 5, 30, 200)))]
    stream = b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames)
    ending = chance.choice(("well", "well", "cut", "bad"))
    whole = len(frames)
    if ending == "cut":
        at = chance.randrange(len(stream))
        whole = _whole_frames(stream[:at])
        stream = stream[:at]
    elif ending == "bad":
        stream += _LENGTH.pack(chance.choice(_BAD_LENGTHS)) + chance.randbytes(chance.randrange(100))
    budget = Budget(chance.choice((1024 * 1024, 64 * 1024 * 1024)))
    service, other = Echo(), Echo()
    first, second = _Pair(service, budget), _Pair(other, budget)
    await first.open()
    await second.open()
    _, received = await asyncio.gather(
        first.send(random_pieces(chance, stream), end=ending != "bad"), first.receive(chance)
    )
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
        raise Finding(f"{len(seen)} frames were served, {len(frames)} sent, or other ones than were sent")
    responses = b"".join(bytes(b"".join(reply_to(frame))) for frame in frames if frame[4] != SILENT)
    if not responses.startswith(received) or (complete and received != responses):
        raise Finding(f"{len(received)} bytes of responses came, {len(responses)} were expected, or other ones")


async def _probe(other: _Pair, budget: Budget) -> None:
    """The connection beside it must be served, and nothing may be counted as held any more."""
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
    """Run the fuzzer."""
    collected = listen()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        def example(chance: random.Random) -> int:
            tried = runner.run(_example(chance))
            collected.check()
            return tried

        return run("trials.fuzz_framing", example)


if __name__ == "__main__":
    sys.exit(main())
