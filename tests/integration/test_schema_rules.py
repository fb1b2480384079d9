"""Schema rules of topics, with unmodified clients and Confluent's serialisers, against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import psutil
import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.schema_registry import header_schema_id_serializer
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp

from millstream.core.errors import InvalidBatch
from millstream.protocol.private.message import decode, encode
from millstream.protocol.private.subscription_messages import (
    AppendLetterRequest,
    AppendLetterResponse,
)
from millstream.protocol.records.batch import COMPRESSION_NONE, COMPRESSION_ZSTD
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream_testing.command import CommandLine
from millstream_testing.server import Server

ORDER = '{"type":"record","name":"Order","fields":[{"name":"id","type":"long"},{"name":"note","type":"string"}]}'
PAID = '{"type":"object","properties":{"id":{"type":"integer"}},"required":["id"],"title":"Paid"}'
INVALID_RECORD = 87
CLUSTER_AUTHORIZATION_FAILED = 31


def rule(millstream: CommandLine, topic: str, *, validate: str, schema: str | None = None) -> str:
    subject = f"{topic}-value"
    made = millstream("topic", "create", topic, "--partitions", "1")
    assert made.code == 0, made
    altered = millstream("topic", "alter", topic, "--schema", schema or f"value={subject}", "--validate", validate)
    assert altered.code == 0, altered
    return subject


def of(topic: str, field: MessageField = MessageField.VALUE) -> SerializationContext:
    return SerializationContext(topic, field)


def avro(registry: Any, topic: str, *ids: int) -> list[bytes]:
    serializer = AvroSerializer(registry, ORDER)
    return [serializer({"id": number, "note": "n"}, of(topic)) or b"" for number in ids]


def send(
    server: Server,
    topic: str,
    records: Sequence[NewRecord | bytes | None],
    *,
    compression: int = COMPRESSION_NONE,
    client_id: str = "test",
) -> int:
    rows = [record if isinstance(record, NewRecord) else NewRecord(b"k", record, (), 1) for record in records]

    async def produce() -> int:
        async with Client.connect(server.kafka, client_id=client_id, timeout_s=30) as client:
            return (await client.produce(topic, 0, encode_batch(rows, compression=compression))).base_offset

    return asyncio.run(produce())


def refused(server: Server, topic: str, records: Sequence[Any], **more: Any) -> list[tuple[int, str]]:
    with pytest.raises(InvalidBatch) as caught:
        send(server, topic, records, **more)
    return [(record.batch_index, record.message) for record in caught.value.records]


@pytest.mark.parametrize("compression", [COMPRESSION_NONE, COMPRESSION_ZSTD])
@pytest.mark.parametrize("count", [3, 500])
def test_records_without_an_id_of_the_subject_are_refused_and_nothing_is_stored(
    server: Server, millstream: CommandLine, registry: Any, topic: str, compression: int, count: int
) -> None:
    rule(millstream, topic, validate="id")
    (good,) = avro(registry, topic, 1)
    assert send(server, topic, [good] * count, compression=compression) == 0
    (other,) = avro(registry, f"{topic}-other", 1)
    # The same schema has the same id in both subjects; another one does not.
    assert other == good
    foreign = JSONSerializer(PAID, registry)({"id": 1}, of(f"{topic}-json")) or b""
    mixed = [good] * count + [foreign, b"plain text", b"", None]
    wrong = refused(server, topic, mixed, compression=compression)
    assert [index for index, _ in wrong] == [count, count + 1, count + 2]
    assert f"is not a schema of subject '{topic}-value'" in wrong[0][1]
    assert "does not start with a schema id" in wrong[1][1]
    # Nothing of it was appended, and a tombstone needs no schema.
    assert send(server, topic, [None], compression=compression) == count


def test_only_nodes_may_write_nonconforming_records(server: Server, millstream: CommandLine, topic: str) -> None:
    """Letters are exempt from the rule of a dead letter topic; a client cannot become a node by its client id."""
    rule(millstream, topic, validate="id")
    assert refused(server, topic, [b"plain text"], client_id="dead-letters")
    assert "1 of 1 record does not conform" in millstream("publish", topic, "plain text").err

    async def pretend(node_id: int, secret: str) -> AppendLetterResponse:
        batch = bytes(encode_batch([NewRecord(b"k", b"plain text", (), 1)]))
        body = encode(AppendLetterRequest(topic, 0, batch, node_id, secret))
        async with Client.connect(server.kafka, client_id="dead-letters", timeout_s=30) as client:
            return decode(await client.private(None, AppendLetterRequest.KEY, body), AppendLetterResponse)

    for node_id, secret in ((1, ""), (1, "guess"), (7, "")):
        response = asyncio.run(pretend(node_id, secret))
        assert (response.error, response.offset) == (CLUSTER_AUTHORIZATION_FAILED, -1)
    assert send(server, topic, [None]) == 0


def test_content_must_decode_and_satisfy_the_schema(
    server: Server, millstream: CommandLine, registry: Any, topic: str
) -> None:
    rule(millstream, topic, validate="content")
    first, second = avro(registry, topic, 1, 2)
    assert send(server, topic, [first, second]) == 0
    wrong = refused(server, topic, [first, second[:-1], second + b"!"], compression=COMPRESSION_ZSTD)
    assert [index for index, _ in wrong] == [1, 2]
    assert "does not decode as Avro" in wrong[0][1]
    assert "1 bytes are left" in wrong[1][1]
    assert send(server, topic, [first]) == 2


def test_json_content_is_validated(server: Server, millstream: CommandLine, registry: Any, topic: str) -> None:
    rule(millstream, topic, validate="content")
    good = JSONSerializer(PAID, registry)({"id": 1}, of(topic)) or b""
    assert send(server, topic, [good]) == 0
    prefix = good[:5]
    wrong = refused(server, topic, [prefix + b'{"id":"x"}', prefix + b"{}", prefix + b"{"])
    assert [index for index, _ in wrong] == [0, 1, 2]
    assert "at '/id'" in wrong[0][1]
    assert "required" in wrong[1][1]
    assert "not JSON" in wrong[2][1]


def test_protobuf_messages_are_found_by_their_index(
    server: Server, millstream: CommandLine, registry: Any, topic: str
) -> None:
    rule(millstream, topic, validate="content")
    serializer = ProtobufSerializer(Struct, registry)
    good = serializer(Struct(fields={}), of(topic)) or b""
    when = ProtobufSerializer(Timestamp, registry)(Timestamp(seconds=1), of(f"{topic}-time")) or b""
    assert send(server, topic, [good]) == 0
    wrong = refused(server, topic, [when, good[:5] + b"\x02\x08", good + b"\xff"])
    assert [index for index, _ in wrong] == [0, 1, 2]
    assert "no message at index [4]" in wrong[1][1]
    assert "does not decode as Protobuf" in wrong[2][1]


def test_ids_in_headers_and_keys_count(server: Server, millstream: CommandLine, registry: Any, topic: str) -> None:
    keys = f"{topic}-key"
    rule(millstream, topic, validate="content")
    millstream("topic", "alter", topic, "--schema", f"key={keys}")
    key = AvroSerializer(registry, '"string"')("k", of(topic, MessageField.KEY))
    headed = SerializationContext(topic, MessageField.VALUE, headers=[])
    value = AvroSerializer(registry, ORDER, conf={"schema.id.serializer": header_schema_id_serializer})(
        {"id": 1, "note": ""}, headed
    )
    sent: Any = headed.headers
    headers = tuple((name, bytes(content)) for name, content in sent)
    assert [name for name, _ in headers] == ["__value_schema_id"]
    assert send(server, topic, [NewRecord(key, value, headers, 1)]) == 0
    unknown = (("__value_schema_id", b"\1" + bytes(16)),)
    wrong = refused(
        server,
        topic,
        [NewRecord(key, value, unknown, 1), NewRecord(key, value, (), 1), NewRecord(b"k", None, (), 1)],
    )
    assert [index for index, _ in wrong] == [0, 1, 2]
    assert "guid 00000000" in wrong[0][1]
    assert "key: " in wrong[2][1]


def test_a_client_library_reports_the_refusal(
    server: Server, millstream: CommandLine, registry: Any, topic: str
) -> None:
    rule(millstream, topic, validate="content")
    outcomes: list[Any] = []
    producer = Producer({"bootstrap.servers": server.kafka, "compression.type": "lz4"})
    producer.produce(topic, b"no schema", on_delivery=lambda error, _message: outcomes.append(error))
    assert producer.flush(30) == 0
    assert isinstance(KafkaException(outcomes[0]), KafkaException)
    assert outcomes[0].code() == INVALID_RECORD
    # Without the rule, everything is accepted.
    millstream("topic", "alter", topic, "--validate", "off")
    producer.produce(topic, b"no schema", on_delivery=lambda error, _message: outcomes.append(error))
    assert producer.flush(30) == 0
    assert outcomes[1] is None


def test_decompression_bombs_cost_bounded_memory_and_delay_no_other_client(
    server: Server, millstream: CommandLine, registry: Any, topic: str
) -> None:
    rule(millstream, topic, validate="content")
    (good,) = avro(registry, topic, 1)
    plain = f"{topic}-plain"
    assert millstream("topic", "create", plain, "--partitions", "1").code == 0
    # 40 MiB is below the node's limit for decompressed batches, 80 MiB is beyond it.
    large = [NewRecord(None, good[:5] + bytes(1024 * 1024), (), 1)] * 40
    process = psutil.Process(server.pid)

    async def run() -> tuple[list[BaseException | object], int]:
        outcomes: list[BaseException | object] = []
        quick = 0
        async with (
            Client.connect(server.kafka, client_id="test", timeout_s=60) as client,
            Client.connect(server.kafka, client_id="other", timeout_s=60) as other,
        ):
            small = encode_batch([NewRecord(None, b"x", (), 1)])
            await other.produce(plain, 0, small)
            batches = [bytes(encode_batch(large * times, compression=COMPRESSION_ZSTD)) for times in (1, 2)]
            # A sync of a busy disk may take longer than the bombs of one round.
            for _ in range(20):
                heavy = [asyncio.ensure_future(client.produce(topic, 0, bytearray(batch))) for batch in batches * 3]
                while not all(task.done() for task in heavy):
                    await other.produce(plain, 0, small)
                    quick += not all(task.done() for task in heavy)
                outcomes += await asyncio.gather(*heavy, return_exceptions=True)
                if quick:
                    break
        return outcomes, quick

    before = process.memory_info().rss
    outcomes, quick = asyncio.run(run())
    assert all(isinstance(outcome, InvalidBatch) for outcome in outcomes), outcomes
    # Others are served meanwhile, and the broker itself never holds the decompressed data.
    assert quick > 0
    assert process.memory_info().rss - before < 200 * 1024 * 1024
    assert send(server, topic, [good]) == 0


def test_the_rule_is_shown_and_removed(millstream: CommandLine, topic: str) -> None:
    subject = rule(millstream, topic, validate="content")
    settings = millstream("topic", "describe", topic, "--json").document["overrides"]
    assert settings["millstream.schema.value"] == subject
    assert settings["millstream.schema.validate"] == "content"
    millstream("topic", "alter", topic, "--schema", "value=", "--json")
    assert "millstream.schema.value" not in millstream("topic", "describe", topic, "--json").document["overrides"]
    assert "value=SUBJECT" in millstream("topic", "alter", topic, "--schema", "values=x").err
