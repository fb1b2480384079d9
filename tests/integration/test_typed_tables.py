"""Payloads with registered schemas become typed columns: in lake tables, in the data source, and back into topics."""

from __future__ import annotations

import datetime
import json
import uuid
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake
import pytest
from confluent_kafka import Producer
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.struct_pb2 import Struct

from millstream.core.lake_url import QUARANTINE_SUFFIX
from millstream.core.pipeline import Pipeline, PipelineKind
from millstream.pipelines.jobs.job import JobContext
from millstream.pipelines.jobs.transform.job import TransformJob
from millstream_testing.command import CommandLine
from millstream_testing.landing import land_job, run_and_close
from millstream_testing.server import Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# An interrupted call into the JVM leaves the session unusable, and the first calls take long on a slow machine.
pytestmark = pytest.mark.timeout(900)

DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}
FIELDS: list[Any] = [
    {"name": "id", "type": "int"},
    {"name": "total", "type": DECIMAL},
    {"name": "day", "type": {"type": "int", "logicalType": "date"}},
    {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    {"name": "ref", "type": {"type": "string", "logicalType": "uuid"}},
    {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["CARD", "CASH"]}},
    {"name": "parts", "type": {"type": "map", "values": "double"}},
    {
        "name": "who",
        "type": ["null", "string", {"type": "record", "name": "Who", "fields": [{"name": "n", "type": "int"}]}],
    },
    {"name": "tags", "type": {"type": "array", "items": "string"}},
]
MOMENT = datetime.datetime(2026, 11, 16, 12, 0, tzinfo=datetime.UTC)
ORDER = {
    "id": 1,
    "total": Decimal("12.50"),
    "day": datetime.date(2026, 11, 16),
    "at": MOMENT,
    "ref": str(uuid.UUID(int=5)),
    "kind": "CASH",
    "parts": {"a": 1.5},
    "who": {"n": 3},
    "tags": ["x", "y"],
}
PAID = {
    "type": "object",
    "title": "Paid",
    "properties": {
        "id": {"type": "integer"},
        "at": {"type": "string", "format": "date-time"},
        "to": {"$ref": "#/$defs/to"},
    },
    "$defs": {"to": {"type": "object", "properties": {"city": {"type": "string"}}}},
    "required": ["id"],
}


def avro(*more: Any) -> str:
    return json.dumps({"type": "record", "name": "Order", "fields": [*FIELDS, *more]})


def of(topic: str) -> SerializationContext:
    return SerializationContext(topic, MessageField.VALUE)


def publish(server: Server, topic: str, *values: bytes | None, key: bytes = b"k") -> None:
    producer = Producer({"bootstrap.servers": server.kafka, "log_level": 0})
    for value in values:
        producer.produce(topic, value, key=key)
    assert producer.flush(60) == 0


def land(spark: SparkSession, server: Server, lake: Path, *topics: str, **settings: str) -> None:
    options = {"topics": ",".join(topics), "decode": "schema", **settings}
    run_and_close(land_job(spark, server.kafka, lake, options))


def rows_of(place: Path) -> list[dict[str, Any]]:
    return sorted(deltalake.DeltaTable(str(place)).to_pyarrow_table().to_pylist(), key=lambda row: int(row["offset"]))


def test_a_table_has_the_types_of_the_schemas_and_follows_their_versions(
    spark: SparkSession, server: Server, registry: Any, topic: str, tmp_path: Path
) -> None:
    assert CommandLine(server.kafka)("topic", "create", topic, "--partitions", "1").code == 0
    first = AvroSerializer(registry, avro())(ORDER, of(topic)) or b""
    publish(server, topic, first, None, b"no schema", b"\0\0\1\0\0" + first[5:], first[:-1])
    land(spark, server, tmp_path, topic)
    kinds = {field.name: field.type for field in deltalake.DeltaTable(str(tmp_path / topic)).schema().fields}
    assert [json.loads(kinds[name].to_json()) for name in ("id", "total", "day", "at", "ref", "kind")] == [
        "long",
        "decimal(10,2)",
        "date",
        "timestamp",
        "string",
        "string",
    ]
    row, empty = rows_of(tmp_path / topic)
    assert {name: row[name] for name in ORDER} == {
        **ORDER,
        "parts": [("a", 1.5)],
        "who": {"string": None, "Who": {"n": 3}},
    }
    assert (empty["id"], empty["value"]) == (None, None)
    refused = rows_of(tmp_path / f"{topic}{QUARANTINE_SUFFIX}")
    assert [row["offset"] for row in refused] == [2, 3, 4]
    assert "does not start with a schema id" in refused[0]["reason"]
    assert "schema id 65536: Schema 65536 not found" in refused[1]["reason"]
    assert "does not decode as Avro" in refused[2]["reason"]

    # A later version adds a field; landed rows are unchanged.
    note = {"name": "note", "type": ["null", "string"], "default": None}
    wider = AvroSerializer(registry, avro(note).replace('"name": "id", "type": "int"', '"name": "id", "type": "long"'))
    publish(server, topic, wider({**ORDER, "id": 2**40, "note": "new"}, of(topic)), first)
    land(spark, server, tmp_path, topic)
    assert [(row["id"], row["note"]) for row in rows_of(tmp_path / topic)] == [
        (1, None),
        (None, None),
        (2**40, "new"),
        (1, None),
    ]


def test_one_row_per_key_has_the_types_of_the_schemas(
    spark: SparkSession, server: Server, registry: Any, topic: str, tmp_path: Path
) -> None:
    assert CommandLine(server.kafka)("topic", "create", topic, "--partitions", "1").code == 0
    encode = AvroSerializer(registry, avro())
    for number, key in ((1, b"a"), (2, b"b"), (3, b"a"), (4, b"c")):
        publish(server, topic, encode({**ORDER, "id": number}, of(topic)), key=key)
    publish(server, topic, None, key=b"b")
    publish(server, topic, b"no schema", key=b"d")
    land(spark, server, tmp_path, topic, mode="upsert")
    table = deltalake.DeltaTable(str(tmp_path / topic))
    kinds = {field.name: json.loads(field.type.to_json()) for field in table.schema().fields}
    assert (kinds["id"], kinds["total"], kinds["day"]) == ("long", "decimal(10,2)", "date")
    rows = table.to_pyarrow_table().to_pylist()
    assert sorted((row["id"], row["total"]) for row in rows) == [(3, ORDER["total"]), (4, ORDER["total"])]
    (refused,) = rows_of(tmp_path / f"{topic}{QUARANTINE_SUFFIX}")
    assert "does not start with a schema id" in refused["reason"]


def test_json_and_protobuf_become_columns(
    spark: SparkSession, server: Server, registry: Any, topic: str, tmp_path: Path
) -> None:
    documents, messages = f"{topic}-j", f"{topic}-p"
    paid = (
        JSONSerializer(json.dumps(PAID), registry)(
            {"id": 1, "at": "2026-11-16T12:00:00Z", "to": {"city": "Ghent"}}, of(documents)
        )
        or b""
    )
    struct = Struct()
    struct.update({"a": 1})
    publish(server, documents, paid, paid[:5] + b'{"id": "x"}')
    publish(server, messages, ProtobufSerializer(Struct, registry)(struct, of(messages)))
    land(spark, server, tmp_path, documents, messages)
    (row,) = rows_of(tmp_path / documents)
    assert (row["id"], row["at"], row["to"]) == (1, MOMENT, {"city": "Ghent"})
    (message,) = rows_of(tmp_path / messages)
    # Its own message without columns.
    assert message["payload_value"] == '{"a":1.0}'


def test_the_data_source_reads_and_writes_typed_columns(
    spark: SparkSession, server: Server, registry: Any, topic: str
) -> None:
    command = CommandLine(server.kafka)
    publish(server, topic, AvroSerializer(registry, avro())(ORDER, of(topic)), b"plain")
    copy = f"{topic}-copy"
    made = command(
        "topic", "create", copy, "--partitions", "1", "--schema", f"value={topic}-value", "--validate", "content"
    )
    assert made.code == 0, made
    source = spark.read.format("millstream").option("kafka.bootstrap.servers", server.kafka)
    frame = source.option("subscribe", topic).option("decode", "schema").load()
    assert dict(frame.dtypes)["total"] == "decimal(10,2)"
    assert dict(frame.dtypes)["parts"] == "map<string,double>"
    good = frame.where("payload_error is null and total > 12").collect()
    assert [(row["id"], row["total"], row["day"], row["who"]["Who"]["n"]) for row in good] == [
        (1, Decimal("12.50"), ORDER["day"], 3)
    ]
    (bad,) = frame.where("payload_error is not null").collect()
    assert (bad["value"], bad["id"]) == (bytearray(b"plain"), None)
    parts = ", ".join(f"'{name}', {name}" for name in ORDER if name != "who")
    value = f"named_struct({parts}, 'who', who.Who) as value"
    rows = frame.where("payload_error is null").selectExpr("key", value)
    target = rows.write.format("millstream").option("kafka.bootstrap.servers", server.kafka).option("topic", copy)
    target.option("schema", f"{topic}-value").mode("append").save()
    (stored,) = command("tail", copy, "--json").documents
    assert (stored["decoded"]["id"], stored["decoded"]["total"], stored["decoded"]["who"]) == (1, "12.50", {"n": 3})
    assert stored["key"] == "k"
    with pytest.raises(Exception, match="that is a struct"):
        frame.selectExpr("value").write.format("millstream").option("kafka.bootstrap.servers", server.kafka).option(
            "topic", copy
        ).option("schema", f"{topic}-value").mode("append").save()


def test_the_data_source_reads_a_protobuf_message_that_is_not_the_first_of_its_file(
    spark: SparkSession, server: Server, registry: Any, topic: str
) -> None:
    file = descriptor_pb2.FileDescriptorProto(name=f"{topic}.proto", package="shop", syntax="proto3")
    for name, field in (("Skip", "a"), ("Bill", "id")):
        file.message_type.add(name=name).field.add(name=field, number=1, type=3, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    skip, bill = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"shop.{name}")) for name in ("Skip", "Bill")
    )
    for message in (skip(a=1), bill(id=7)):
        publish(server, topic, ProtobufSerializer(type(message), registry)(message, of(topic)))
    source = spark.read.format("millstream").option("kafka.bootstrap.servers", server.kafka)
    source = source.option("subscribe", topic).option("decode", "schema")
    first, second = source.load().orderBy("a").select("a", "payload_error").collect()
    assert (second["a"], second["payload_error"]) == (1, None)
    assert "it is a shop.Bill, but the columns are those of shop.Skip" in first["payload_error"]
    assert "schemaMessage=shop.Bill" in first["payload_error"]
    rows = source.schema("id long, a long").load().orderBy("id").collect()
    assert [(row["id"], row["a"]) for row in rows] == [(None, 1), (7, None)]
    named = spark.read.format("millstream").option("kafka.bootstrap.servers", server.kafka).option("subscribe", topic)
    named = named.option("decode", "schema")
    bills = named.option("schemaMessage", "shop.Bill").load().where("payload_error is null").collect()
    assert [bill["id"] for bill in bills] == [7]
    with pytest.raises(Exception, match=r"there are: shop\.Skip, shop\.Bill"):
        named.option("schemaMessage", "Bill").load()


def test_a_transform_reads_and_writes_by_schemas(
    spark: SparkSession, server: Server, registry: Any, topic: str, tmp_path: Path
) -> None:
    command, copy = CommandLine(server.kafka), f"{topic}-totals"
    publish(server, topic, AvroSerializer(registry, avro())(ORDER, of(topic)), b"plain")
    total = json.dumps(
        {"type": "record", "name": "T", "fields": [{"name": "id", "type": "long"}, {"name": "total", "type": DECIMAL}]}
    )
    (tmp_path / "total.avsc").write_text(total)
    assert command("schema", "register", f"{copy}-value", tmp_path / "total.avsc").code == 0
    assert command("topic", "create", copy, "--schema", f"value={copy}-value", "--validate", "content").code == 0
    pipeline = Pipeline(
        pipeline_id=uuid.uuid4(),
        name=f"totals-{uuid.uuid4().hex[:8]}",
        kind=PipelineKind.TRANSFORM,
        overrides={
            "sql": f"SELECT id, total * 2 AS total FROM `{topic}` WHERE payload_error IS NULL",
            "into": copy,
            "into.schema": f"{copy}-value",
            "decode": "schema",
        },
    )
    job = TransformJob(
        pipeline, JobContext(spark=spark, brokers=server.kafka, lake=str(tmp_path), folder=str(tmp_path))
    )
    try:
        while job.step().lag:
            pass
    finally:
        job.close()
    (written,) = command("tail", copy, "--json").documents
    assert written["decoded"] == {"id": 1, "total": "25.00"}


def test_a_transform_of_an_empty_topic_has_the_columns_of_its_schema_and_follows_its_versions(
    spark: SparkSession, server: Server, registry: Any, topic: str, tmp_path: Path
) -> None:
    command, copy = CommandLine(server.kafka), f"{topic}-copy"
    (tmp_path / "order.avsc").write_text(avro())
    assert command("schema", "register", f"{topic}-value", tmp_path / "order.avsc").code == 0
    for name in (topic, copy):
        assert command("topic", "create", name, "--partitions", "1").code == 0

    def transform(sql: str) -> TransformJob:
        pipeline = Pipeline(
            pipeline_id=uuid.uuid4(),
            name=f"copy-{uuid.uuid4().hex[:8]}",
            kind=PipelineKind.TRANSFORM,
            overrides={"sql": sql, "into": copy, "decode": "schema"},
        )
        context = JobContext(spark=spark, brokers=server.kafka, lake=str(tmp_path), folder=str(tmp_path))
        return TransformJob(pipeline, context)

    wrong = transform(f"SELECT no_such FROM `{topic}`")
    with pytest.raises(Exception, match="no_such"):
        wrong.step()
    wrong.close()
    job = transform(f"SELECT payload.* FROM `{topic}`")
    try:
        # It is prepared before there is a message, with fields that the messages do not have in JSON's types.
        assert job.step().rows == 0
        larger = avro({"name": "note", "type": "string", "default": ""})
        publish(server, topic, AvroSerializer(registry, larger)({**ORDER, "note": "new"}, of(topic)))
        while job.step().lag:
            pass
    finally:
        job.close()
    (written,) = [json.loads(document["value"]) for document in command("tail", copy, "--json").documents]
    assert (written["id"], written["total"], written["day"], written["note"]) == (1, 12.5, "2026-11-16", "new")
