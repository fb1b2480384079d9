"""A minimal broker that responds as a test scripts it, for tests of the wire client."""

from __future__ import annotations

import asyncio
import importlib
import uuid
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from kio.schema.errors import ErrorCode

from millstream.protocol.messages import codec
from millstream.protocol.messages.shape import reshape

PRODUCE, FETCH, LIST_OFFSETS, METADATA, FIND_COORDINATOR, API_VERSIONS = 0, 1, 2, 3, 10, 18
Handler = Callable[[codec.RequestHeader, memoryview], Awaitable[Any]]


class ScriptedBroker:
    """Responds to requests with messages, by `handlers`. A handler that raises `EOFError` closes the connection."""

    def __init__(self) -> None:
        self.served = {PRODUCE: (0, 13), FETCH: (4, 17), LIST_OFFSETS: (1, 11), METADATA: (0, 13)}
        self.served |= {FIND_COORDINATOR: (0, 6), API_VERSIONS: (0, 4)}
        self.handlers: dict[int, Handler] = {
            API_VERSIONS: self.respond_to_api_versions,
            METADATA: self.respond_to_metadata,
        }
        self.headers: list[codec.RequestHeader] = []
        self.topics: dict[str, int] = {"orders": 2}
        self.port = 0
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def request_count(self, api_key: int) -> int:
        """Return how many requests of an API have arrived."""
        return sum(header.api_key == api_key for header in self.headers)

    async def start(self) -> None:
        """Listen, on the previous port if there was one."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the listener and every connection, and wait for their tasks."""
        if self._server is not None:
            self._server.close()
            self.hang_up()
            await self._server.wait_closed()
            self._server = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def hang_up(self) -> None:
        """Break every connection, as a crash does."""
        for writer in self._writers:
            writer.transport.abort()

    def write(self, data: bytes) -> None:
        """Send bytes to every client, in addition to what the handlers return."""
        for writer in self._writers:
            writer.write(data)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                frame = memoryview(await reader.readexactly(size))
                header = codec.read_request_header(frame)
                self.headers.append(header)
                response = await self.handlers[header.api_key](header, frame)
                if response is not None:
                    writer.write(self.framed(header, response))
        except (EOFError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    def framed(self, header: codec.RequestHeader, response: Any) -> bytes:
        """Prepend the header of a response; a message may be of any version."""
        if isinstance(response, bytes):
            return codec.response_head(header.api_key, header.version, header.correlation_id, len(response)) + response
        reshaped = reshape(response, codec.load_response_class(header.api_key, header.version))
        return codec.write_response(header.api_key, header.version, header.correlation_id, reshaped)

    async def respond_to_api_versions(self, header: codec.RequestHeader, frame: memoryview) -> Any:
        """Respond to ApiVersions from `served`."""
        oldest, newest = self.served[API_VERSIONS]
        known = oldest <= header.version <= newest
        messages = importlib.import_module(f"kio.schema.api_versions.v{header.version if known else 0}.response")
        keys = self.served if known else {API_VERSIONS: (oldest, newest)}
        listed = tuple(
            messages.ApiVersion(api_key=key, min_version=low, max_version=high) for key, (low, high) in keys.items()
        )
        throttle = {"throttle_time": timedelta(0)} if known and header.version >= 1 else {}
        code = ErrorCode.none if known else ErrorCode.unsupported_version
        return codec.write_entity(messages.ApiVersionsResponse(error_code=code, api_keys=listed, **throttle))

    async def respond_to_metadata(self, header: codec.RequestHeader, frame: memoryview) -> Any:
        """Respond to Metadata from `topics`; this broker is node 1 and leads everything."""
        request = codec.read_request(METADATA, header.version, frame, header.body_at)
        messages: Any = importlib.import_module("kio.schema.metadata.v13.response")
        names = [topic.name for topic in request.topics] if request.topics is not None else list(self.topics)
        return messages.MetadataResponse(
            throttle_time=timedelta(0),
            brokers=(messages.MetadataResponseBroker(node_id=1, host="127.0.0.1", port=self.port),),
            cluster_id="test-cluster",
            controller_id=1,
            topics=tuple(self._topic(messages, name) for name in names),
            error_code=ErrorCode.none,
        )

    def _topic(self, messages: Any, name: str) -> Any:
        known = name in self.topics
        return messages.MetadataResponseTopic(
            error_code=ErrorCode.none if known else ErrorCode.unknown_topic_or_partition,
            name=name,
            topic_id=uuid.uuid5(uuid.NAMESPACE_DNS, name),
            partitions=tuple(
                messages.MetadataResponsePartition(error_code=ErrorCode.none, partition_index=index, leader_id=1)
                for index in range(self.topics.get(name, 0))
            ),
        )


def produced(*codes: ErrorCode, base_offset: int = 42) -> Handler:
    """Respond to produce requests with these codes in turn, and then always with the last one."""
    left = list(codes)

    async def handle(header: codec.RequestHeader, frame: memoryview) -> Any:
        code = left.pop(0) if len(left) > 1 else left[0]
        messages: Any = importlib.import_module("kio.schema.produce.v12.response")
        request = codec.read_request(PRODUCE, header.version, frame, header.body_at)
        of_partition = messages.PartitionProduceResponse(
            index=request.topic_data[0].partition_data[0].index,
            error_code=code,
            base_offset=base_offset,
            record_errors=(),
            error_message="too big for me" if code else None,
        )
        of_topic = messages.TopicProduceResponse(name=request.topic_data[0].name, partition_responses=(of_partition,))
        return messages.ProduceResponse(responses=(of_topic,), throttle_time=timedelta(0))

    return handle


def fetched(records: bytes | None = b"", code: ErrorCode = ErrorCode.none) -> Handler:
    """Respond to every partition of a fetch with the same records."""

    async def handle(header: codec.RequestHeader, frame: memoryview) -> Any:
        messages: Any = importlib.import_module("kio.schema.fetch.v12.response")
        request = codec.read_request(FETCH, header.version, frame, header.body_at)
        responses = tuple(
            messages.FetchableTopicResponse(
                topic=topic.topic,
                partitions=tuple(
                    messages.PartitionData(
                        partition_index=partition.partition,
                        error_code=code,
                        high_watermark=9,
                        last_stable_offset=8,
                        log_start_offset=3,
                        aborted_transactions=None,
                        records=records,
                    )
                    for partition in topic.partitions
                ),
            )
            for topic in request.topics
        )
        return messages.FetchResponse(
            throttle_time=timedelta(0), error_code=ErrorCode.none, session_id=0, responses=responses
        )

    return handle
