"""A scripted broker that stores the batches of idempotent producers, and fails on request."""

from __future__ import annotations

import asyncio
import importlib
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Self

from kio.schema.errors import ErrorCode

from millstream.client.publisher import Publisher
from millstream.protocol.messages import codec
from millstream.protocol.records.batch import read_header
from millstream.protocol.records.record import decode_records
from millstream.protocol.wire.client import Client
from millstream_testing.scripted_broker import METADATA, PRODUCE, ScriptedBroker

INIT_PRODUCER_ID = 22


class ProducerLedger:
    """The batches of idempotent producers, and the faults of the broker: one for each request."""

    def __init__(self, broker: ScriptedBroker) -> None:
        self.broker = broker
        self.stored: dict[tuple[str, int], list[bytes]] = {}
        self.past: list[dict[tuple[str, int], list[bytes]]] = []
        """The contents of deleted topics."""
        self.faults: list[str] = []
        self.metadata_faults: dict[str, list[ErrorCode]] = {}
        """The responses to the next metadata requests about a topic."""
        self.init_faults: list[ErrorCode] = []
        self.held: asyncio.Event | None = None
        """While set, but not fired, produce requests wait for it before they are carried out."""
        self.births: dict[str, int] = {}
        self.values_max = 10**9
        self.requests = 0
        self.producers = 0
        self._state: dict[tuple[str, int, int], tuple[int, dict[int, int]]] = {}
        broker.served |= {INIT_PRODUCER_ID: (0, 5), PRODUCE: (3, 12)}
        broker.handlers[PRODUCE] = self.produce
        broker.handlers[INIT_PRODUCER_ID] = self.init
        broker.handlers[METADATA] = self.metadata

    @classmethod
    @asynccontextmanager
    async def started(cls) -> AsyncIterator[Self]:
        """Run the broker, and check that nothing is left over."""
        broker = ScriptedBroker()
        await broker.start()
        try:
            yield cls(broker)
        finally:
            await broker.stop()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if left:
            raise AssertionError(f"tasks are left over: {left}")

    @asynccontextmanager
    async def publishing(self, **options: Any) -> AsyncIterator[Publisher]:
        async with Client.connect(self.broker.address, timeout_s=60) as client:
            publisher = Publisher(client, **options)
            try:
                yield publisher
            finally:
                await publisher.close()

    @staticmethod
    def give_time(publisher: Publisher, timeout_s: float) -> None:
        """Change the timeout while no message is in flight, so that they time out only where a test wants it."""
        publisher._timeout_s = timeout_s
        for route in publisher._topics.values():
            for queue in route.queues:
                queue.timeout_s = timeout_s
        for lane in publisher._senders.values():
            lane._request_s, lane._patience_s = timeout_s, 2 * timeout_s
            if lane._watch is not None:
                lane._watch.cancel()
                lane._watch = None
        if publisher._expiry is not None:
            publisher._expiry.cancel()
            publisher._expiry = None

    async def warm_up(self) -> None:
        """Import everything that a publish needs, before a test with a short time limit."""
        async with self.publishing() as publisher:
            await publisher.send("orders", None, b"")
        self.stored.clear()
        self._state.clear()
        self.requests = self.producers = 0

    def delete(self, topic: str) -> None:
        if self.broker.topics.pop(topic, None) is None:
            return
        self.past.append({key: log for key, log in self.stored.items() if key[0] == topic})
        self.stored = {key: log for key, log in self.stored.items() if key[0] != topic}
        self._state = {key: state for key, state in self._state.items() if key[0] != topic}

    def create(self, topic: str, partitions: int = 2) -> None:
        """Create a topic, distinct from any earlier one of that name."""
        self.births[topic] = self.births.get(topic, 0) + 1
        self.broker.topics[topic] = partitions

    def topic_id(self, topic: str) -> uuid.UUID:
        return uuid.uuid5(uuid.NAMESPACE_DNS, f"{topic} {self.births.get(topic, 0)}")

    async def metadata(self, header: codec.RequestHeader, frame: memoryview) -> Any:
        """Respond with topics, or with the next fault."""
        response = await self.broker.respond_to_metadata(header, frame)
        return replace(response, topics=tuple(self._topic_metadata(topic) for topic in response.topics))

    def _topic_metadata(self, topic: Any) -> Any:
        faults = self.metadata_faults.get(topic.name)
        if faults and (fault := faults.pop(0)):
            return replace(topic, error_code=fault, partitions=())
        return replace(topic, topic_id=self.topic_id(topic.name))

    async def init(self, header: codec.RequestHeader, frame: memoryview) -> Any:
        messages: Any = importlib.import_module("kio.schema.init_producer_id.v5.response")
        self.producers += 1
        code = self.init_faults.pop(0) if self.init_faults else ErrorCode.none
        return messages.InitProducerIdResponse(
            throttle_time=timedelta(0), error_code=code, producer_id=self.producers, producer_epoch=0
        )

    async def produce(self, header: codec.RequestHeader, frame: memoryview) -> Any:
        """Store batches, or fail."""
        messages: Any = importlib.import_module("kio.schema.produce.v12.response")
        request = codec.read_request(PRODUCE, header.version, frame, header.body_at)
        fault = self.faults.pop(0) if self.faults else ""
        self.requests += 1
        if self.held is not None:
            await self.held.wait()
        if fault == "hang up before":
            raise EOFError
        topics = []
        for topic in request.topic_data:
            responses = [
                self._append(topic.name, partition.index, bytes(partition.records), fault)
                for partition in topic.partition_data
            ]
            partitions = tuple(
                messages.PartitionProduceResponse(
                    index=partition.index, error_code=code, base_offset=offset, record_errors=(), error_message=None
                )
                for partition, (code, offset) in zip(topic.partition_data, responses, strict=True)
            )
            topics.append(messages.TopicProduceResponse(name=topic.name, partition_responses=partitions))
        if fault == "hang up after":
            raise EOFError
        return messages.ProduceResponse(responses=tuple(topics), throttle_time=timedelta(0)) if request.acks else None

    def _append(self, topic: str, partition: int, batch: bytes, fault: str) -> tuple[ErrorCode, int]:
        if fault in ("deleted", "recreated"):
            self.delete(topic)
        if fault == "recreated":
            self.create(topic)
        if not 0 <= partition < self.broker.topics.get(topic, 0):
            return ErrorCode.unknown_topic_or_partition, -1
        if fault == "not leader":
            return ErrorCode.not_leader_or_follower, -1
        if fault == "too few replicas":
            return ErrorCode.not_enough_replicas, -1
        if fault == "refused":
            return ErrorCode.topic_authorization_failed, -1
        if fault == "broken sequence":
            return ErrorCode.out_of_order_sequence_number, -1
        header = read_header(batch)
        if header.record_count > self.values_max:
            return ErrorCode.message_too_large, -1
        log = self.stored.setdefault((topic, partition), [])
        if header.producer_id >= 0:
            expected, seen = self._state.get((topic, partition, header.producer_id), (header.base_sequence, {}))
            if header.base_sequence in seen:
                return ErrorCode.none, seen[header.base_sequence]
            if header.base_sequence != expected:
                return ErrorCode.out_of_order_sequence_number, -1
            seen = {**dict(list(seen.items())[-4:]), header.base_sequence: len(log)}
            self._state[topic, partition, header.producer_id] = header.last_sequence + 1, seen
        base = len(log)
        log += [record.value or b"" for record in decode_records(batch)]
        if fault == "after append":
            return ErrorCode.not_enough_replicas_after_append, -1
        return ErrorCode.none, base
