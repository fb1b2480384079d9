"""Send corrupted requests of every API and version to a broker: each must get a response or a closed connection.

    python -m trials.fuzz_requests --seconds 60

An example is a broker in this process, on a disk in memory and its own socket, that gets some hundred requests: valid
ones with random contents that often name existing resources, most of them with flipped, missing, repeated or inserted
bytes. A response must have the correlation id of its request, and kio must be able to read all of it; the broker must
continue to serve another connection; it must not log a traceback, and at the end hold no memory for any client.
"""

from __future__ import annotations

import asyncio
import random
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from uuid import UUID

import uvloop
from kio.schema.metadata.v12.request import MetadataRequest, MetadataRequestTopic
from kio.schema.types import TopicName
from kio.serial import entity_reader
from trials.fuzz_trial import Finding, collect_logs, run

from millstream.broker.node import Broker
from millstream.core.config import Config
from millstream.core.errors import MillstreamError, ProtocolViolation
from millstream.protocol.messages import codec
from millstream.protocol.private.message import decode_document
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.api_requests import write_request
from millstream_testing.files import MemoryFiles
from millstream_testing.messages import random_message, versions_of

REQUESTS = 300
TOPICS = ("a", "orders.created")
RESPONSE_S_MAX = 30.0
LONG_RESPONSE_S = 0.02
"""The timeout for requests that specify how long they may take."""

_DESCRIBE_TRANSACTIONS = 65
_PRODUCE, _FETCH, _API_VERSIONS, _JOIN_GROUP, _SYNC_GROUP, _NODE_STATUS = 0, 1, 18, 11, 14, 32000
_MAY_WAIT = frozenset({_PRODUCE, _FETCH, _JOIN_GROUP, _SYNC_GROUP})
_EDGES = (0, 1, 0x7F, 0x80, 0xFF)
_INTEGERS = (0, 1, 2, 3, -1, 100, 1000)
_PROBE = write_request(7, "probe", codec.load_request_class(_API_VERSIONS, 0)())
_STATUS = codec.request_head(_NODE_STATUS, 0, 7, "probe")
_BATCH = bytes(encode_batch([NewRecord(b"key", b"value", (), 1)], producer_id=1, producer_epoch=0, base_sequence=0))


class Biased(random.Random):
    """Random values biased towards existing resources: small numbers, topic ids, real batches."""

    topic_ids: list[UUID]

    def getrandbits(self, k: int, /) -> int:
        if k == 128 and self.topic_ids and super().random() < 0.7:
            return super().choice(self.topic_ids).int
        return super().getrandbits(k)

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        first, end = (0, start) if stop is None else (start, stop)
        if end - first > 100 and super().random() < 0.8:
            return super().choice([value for value in _INTEGERS if first <= value < end])
        return super().randrange(first, end, step)

    def randbytes(self, n: int) -> bytes:
        return _BATCH if super().random() < 0.5 else super().randbytes(n)


def mutate(rng: random.Random, frame: bytes) -> bytes:
    """Corrupt some bytes of a request, or none."""
    corrupted = bytearray(frame)
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 8))):
        at = rng.randrange(len(corrupted)) if corrupted else 0
        kind = rng.choice(("flip", "edge", "cut", "remove", "double", "insert"))
        if kind == "flip" and corrupted:
            corrupted[at] ^= 1 << rng.randrange(8)
        elif kind == "edge" and corrupted:
            corrupted[at] = rng.choice(_EDGES)
        elif kind == "cut":
            del corrupted[at:]
        elif kind == "remove":
            del corrupted[at : at + rng.choice((1, 2, 4, 16))]
        elif kind == "double":
            corrupted[at:at] = corrupted[at : at + rng.choice((1, 4, 64))]
        else:
            corrupted[at:at] = bytes(rng.getrandbits(8) for _ in range(rng.choice((1, 4, 20))))
    return bytes(corrupted)


class Trial:
    """One broker and the requests sent to it."""

    def __init__(self, broker: Broker, rng: random.Random) -> None:
        self._chance = rng
        host, _, port = broker.kafka_address.rpartition(":")
        self._address = (host, int(port))
        self._versions: list[tuple[int, int]] = []
        self._topic_ids: list[UUID] = []

    async def run(self) -> int:
        """Send all requests."""
        self._versions = list(await self._served_versions())
        self._topic_ids = await self._create_topics()
        reader, writer = await asyncio.open_connection(*self._address)
        for number in range(REQUESTS):
            frame = mutate(self._chance, self._request(number))
            await self._send(frame)
            writer.write(_PROBE)
            if codec.read_correlation_id(await asyncio.wait_for(_read(reader), RESPONSE_S_MAX)) != 7:
                raise Finding("the other connection got a wrong response")
            if number % 100 == 99:
                self._topic_ids = await self._create_topics()
        await self._check_released(reader, writer)
        writer.close()
        return REQUESTS

    def _request(self, number: int) -> bytes:
        """Return a valid request, without the size of its frame."""
        key, version = self._chance.choice(self._versions)
        biased = Biased(self._chance.getrandbits(64))
        biased.topic_ids = self._topic_ids
        while True:
            message = random_message(codec.load_request_class(key, version), biased)
            with suppress(MillstreamError):
                return write_request(number, self._chance.choice(("fuzz", None)), message)[4:]

    async def _send(self, frame: bytes) -> None:
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(struct.pack(">i", len(frame)) + frame)
            if self._chance.random() < 0.1:
                writer.write_eof()
            may_wait = len(frame) >= 2 and struct.unpack_from(">h", frame)[0] in _MAY_WAIT
            timeout_s = LONG_RESPONSE_S if may_wait else RESPONSE_S_MAX
            try:
                response = await asyncio.wait_for(_read(reader), timeout_s)
            except TimeoutError:
                if timeout_s == RESPONSE_S_MAX:
                    raise Finding(f"no response and no closed connection: {frame.hex()}") from None
                return
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            _check_response(frame, response)
        finally:
            writer.close()

    async def _served_versions(self) -> Iterator[tuple[int, int]]:
        response = codec.read_response(_API_VERSIONS, 0, await self._request_once(_PROBE))
        return (
            (api.api_key, version)
            for api in response.api_keys
            for version in versions_of(api.api_key)
            if api.min_version <= version <= api.max_version
        )

    async def _create_topics(self) -> list[UUID]:
        """Create the topics that requests name, unless they exist; return their ids."""
        named = tuple(MetadataRequestTopic(topic_id=None, name=TopicName(name)) for name in TOPICS)
        request = MetadataRequest(
            topics=named, allow_auto_topic_creation=True, include_topic_authorized_operations=False
        )
        response = codec.read_response(3, 12, await self._request_once(write_request(1, "setup", request)))
        return [topic.topic_id for topic in response.topics if topic.topic_id is not None]

    async def _request_once(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*self._address)
        writer.write(request)
        response = await asyncio.wait_for(_read(reader), RESPONSE_S_MAX)
        writer.close()
        return response

    async def _check_released(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Check that no memory is held once all other connections are closed."""
        for _ in range(200):
            writer.write(struct.pack(">i", len(_STATUS)) + _STATUS)
            response = await asyncio.wait_for(_read(reader), RESPONSE_S_MAX)
            status = decode_document(memoryview(response)[codec.response_body_at(_NODE_STATUS, 0, response) :])
            values = {metric["name"]: metric["samples"][0][0] for metric in status["metrics"] if metric["samples"]}
            held = values["millstream_inflight_bytes"]
            # The remaining bytes belong to this status request.
            if values["millstream_connections"] == 1 and held < 4096:
                return
            await asyncio.sleep(0.05)
        raise Finding(f"{held} bytes are held for {values['millstream_connections']} connections after all were closed")


async def _read(reader: asyncio.StreamReader) -> bytes:
    (size,) = struct.unpack(">i", await reader.readexactly(4))
    return await reader.readexactly(size)


def _check_response(frame: bytes, response: bytes) -> None:
    header = codec.read_request_header(frame)
    if codec.read_correlation_id(response) != header.correlation_id:
        raise Finding(f"the response belongs to another request: {frame.hex()}")
    if header.api_key >= _NODE_STATUS:
        return
    try:
        response_class = codec.load_response_class(header.api_key, header.version)
    except ProtocolViolation:
        if header.api_key != _API_VERSIONS:
            raise Finding(f"a version that does not exist got a response: {frame.hex()}") from None
        header, response_class = header._replace(version=0), codec.load_response_class(_API_VERSIONS, 0)
    at = codec.response_body_at(header.api_key, header.version, response)
    try:
        _, size = entity_reader(response_class)(memoryview(response).toreadonly(), at)
    except Exception as error:
        if header.api_key == _DESCRIBE_TRANSACTIONS and "negative timestamp" in str(error):
            # As in Kafka, a transaction that has not begun has the start time -1, which kio cannot represent.
            return
        raise Finding(f"kio cannot read the response to {frame.hex()}: {error}") from error
    if at + size != len(response):
        raise Finding(f"{len(response) - at - size} bytes follow the response to {frame.hex()}")


async def _example(rng: random.Random) -> int:
    with tempfile.TemporaryDirectory() as folder:
        config = Config(data=folder, kafka="127.0.0.1:0", http="127.0.0.1:0", group_initial_delay_ms=0, shutdown_ms=0)
        broker = Broker(config, files=MemoryFiles(open_files_max=64))
        await broker.start()
        try:
            return await Trial(broker, rng).run()
        finally:
            await broker.stop()


def main() -> int:
    collected = collect_logs()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        def example(rng: random.Random) -> int:
            tried = runner.run(_example(rng))
            collected.check()
            return tried

        return run("trials.fuzz_requests", example)


if __name__ == "__main__":
    sys.exit(main())
