"""Spark with brokers that authenticate: the driver logs in, tasks get tokens, and secrets stay with the driver."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pytest

from millstream.client.admin.security import create_token, list_tokens
from millstream.core import acl
from millstream.core.errors import InvalidRequest
from millstream.pipelines.source.access import parse_access
from millstream.pipelines.source.source import MillstreamSource
from millstream.protocol.private.security_messages import TokenDescription
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.credentials import Credentials, client_tls
from millstream.spark.bulk import records, task_access
from millstream_testing.security import Certificates, declare_security
from millstream_testing.server import Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# An interrupted call into the JVM leaves the session unusable, and the first calls take long on a slow machine.
pytestmark = pytest.mark.timeout(900)

USER, PASSWORD = "alice", "alice-password"


class Locked(NamedTuple):
    server: Server
    ca: Path

    @property
    def options(self) -> dict[str, str]:
        """Options as in a job that reads Kafka."""
        module = "org.apache.kafka.common.security.scram.ScramLoginModule"
        return {
            "kafka.bootstrap.servers": self.server.kafka,
            "kafka.security.protocol": "SASL_SSL",
            "kafka.sasl.mechanism": "SCRAM-SHA-256",
            "kafka.sasl.jaas.config": f'{module} required username="{USER}" password="{PASSWORD}";',
            "kafka.ssl.truststore.type": "PEM",
            "kafka.ssl.truststore.location": str(self.ca),
        }

    def ask(self, question: Any) -> Any:
        async def asked() -> Any:
            credentials = Credentials(tls=client_tls(self.ca), user=USER, password=PASSWORD)
            async with Client.connect(self.server.kafka, credentials=credentials) as client:
                return await question(client)

        return asyncio.run(asked())

    def tokens(self) -> list[TokenDescription]:
        return list(self.ask(list_tokens))


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    """A server on which alice may use topics, groups and transactions whose names begin with hers, or with spark."""
    folder = tmp_path_factory.mktemp("locked-spark")
    certificates = Certificates(folder / "certs")
    rules = frozenset(
        acl.Acl(
            resource_type=kind,
            resource_name=name,
            pattern=acl.PatternType.PREFIXED,
            principal=f"User:{USER}",
            operation=acl.Operation.ALL,
        )
        for kind, name in (
            (acl.ResourceType.TOPIC, "alice"),
            (acl.ResourceType.GROUP, "alice"),
            (acl.ResourceType.TRANSACTIONAL_ID, "spark/"),
            (acl.ResourceType.TRANSACTIONAL_ID, "nightly"),
        )
    ) | {
        acl.Acl(
            resource_type=acl.ResourceType.TRANSACTIONAL_ID,
            resource_name="*",
            principal=f"User:{USER}",
            operation=acl.Operation.ALL,
        )
    }
    declare_security(folder / "data", {USER: PASSWORD}, rules)
    settings = {"auth": "required", "tls-cert": certificates.node, "tls-key": certificates.node_key}
    with Server(folder / "data", settings=settings) as server:
        yield Locked(server, certificates.ca)


def scopes(tokens: list[TokenDescription]) -> set[tuple[str, str, str]]:
    return {(rule.operation, rule.type, rule.name) for token in tokens for rule in token.scope}


def test_tables_are_written_and_read_with_kafka_options(spark: SparkSession, locked: Locked) -> None:
    frame = spark.createDataFrame([("a", "1"), ("b", "2")], "key string, value string")
    writing = frame.write.format("millstream").options(topic="alice-table", **locked.options)
    writing.option("txnAppId", "nightly").option("txnVersion", "1").mode("append").save()
    table = spark.read.format("millstream").options(subscribe="alice-table", **locked.options).load()
    assert sorted(row.value for row in table.selectExpr("cast(value as string)").collect()) == ["1", "2"]
    explained = table._jdf.queryExecution().toString()
    assert PASSWORD not in explained
    assert PASSWORD not in json.dumps(spark.sparkContext.getConf().getAll())
    tokens = locked.tokens()
    assert {token.owner for token in tokens} == {f"User:{USER}"}
    assert ("write", "topic", "alice-table") in scopes(tokens)
    assert ("read", "topic", "alice-table") in scopes(tokens)
    assert ("read", "topic", "*") not in scopes(tokens), "a token of a task may do what its query does, and no more"


def test_a_stream_logs_in_by_a_file_and_its_tasks_by_tokens(
    spark: SparkSession, locked: Locked, tmp_path: Path
) -> None:
    made = locked.ask(create_token)
    file = tmp_path / "token"
    file.write_text(made.token, encoding="utf-8")
    options = {"kafka.bootstrap.servers": locked.server.kafka, "tls": str(locked.ca), "tokenFile": str(file)}
    frame = spark.createDataFrame([(str(number),) for number in range(10)], "value string")
    frame.write.format("millstream").options(topic="alice-in", **options).mode("append").save()
    stream = spark.readStream.format("millstream").options(
        subscribe="alice-in", startingOffsets="earliest", maxOffsetsPerTrigger="2", **options
    )
    writer = stream.load().selectExpr("value").writeStream.format("millstream").options(topic="alice-out", **options)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
    query.awaitTermination()
    assert query.exception() is None
    out = spark.read.format("millstream").options(subscribe="alice-out", **options).load()
    assert out.count() == 10
    sink = [token for token in locked.tokens() if ("write", "topic", "alice-out") in scopes([token])]
    assert {token.parent for token in sink} == {made.token_id}
    assert len(sink) < len(query.recentProgress), "processes that plan batches keep their tokens"


def test_bulk_jobs_use_the_token_of_the_driver(spark: SparkSession, locked: Locked) -> None:
    frame = spark.createDataFrame([("1",), ("2",)], "value string")
    frame.write.format("millstream").options(topic="alice-bulk", **locked.options).mode("append").save()
    brokers, access = locked.server.kafka, task_access(locked.server.kafka, ["alice-bulk"], options=locked.options)
    assert PASSWORD.encode() not in pickle.dumps(access)
    assert access.token not in repr(access)

    def sizes(batches: Any) -> Iterator[pa.RecordBatch]:
        for batch in records(batches, brokers, columns=("value",), access=access):
            yield pa.RecordBatch.from_pydict({"rows": [batch.num_rows]})

    ranges = spark.read.format("millstream").options(subscribe="alice-bulk", mode="ranges", **locked.options).load()
    assert ranges.mapInArrow(sizes, "rows long").groupBy().sum().collect()[0][0] == 2


def test_a_topic_without_read_permission_is_refused(spark: SparkSession, locked: Locked) -> None:
    table = spark.read.format("millstream").options(subscribe="others", **locked.options)
    with pytest.raises(Exception, match="others") as refused:
        table.load().count()
    assert PASSWORD not in str(refused.value)


def test_the_credentials_of_a_driver_are_not_sent_anywhere(locked: Locked) -> None:
    access = parse_access({name: text for name, text in locked.options.items() if name != "kafka.bootstrap.servers"})
    assert PASSWORD not in repr(access)
    with pytest.raises(InvalidRequest, match="cannot be pickled"):
        pickle.dumps(access)
    source = MillstreamSource({"subscribe": "alice-table", **locked.options})
    assert PASSWORD.encode() in pickle.dumps(source), "it has to reach the process that plans"
    reader = source.reader(source.schema())
    assert PASSWORD.encode() not in pickle.dumps((source, reader))
    environment = {"MILLSTREAM_TLS_CA": str(locked.ca), "MILLSTREAM_USER": USER, "MILLSTREAM_PASSWORD": PASSWORD}
    assert parse_access({}, environment) == parse_access({"tls": str(locked.ca), "user": USER, "password": PASSWORD})
    assert not parse_access({}, os.environ).is_known
