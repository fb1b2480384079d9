"""Transforms and routes on a real Spark and a real server: from topics to topics, every message once."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark.errors import PySparkException
from pyspark.sql.types import StructType

from millstream.core.errors import FilterError, InvalidSetting, UnknownGroup, UnknownTopic
from millstream.core.payload_columns import ColumnType, PayloadColumn, parse_columns
from millstream.core.pipeline import Pipeline, PipelineKind, Rule
from millstream.core.sql import read_select
from millstream.pipelines.jobs.batch_loop import Plan
from millstream.pipelines.jobs.error_reason import reason_of
from millstream.pipelines.jobs.job import JobContext, TimeWindow
from millstream.pipelines.jobs.route.job import RouteJob
from millstream.pipelines.jobs.transform.dry_run import dry_run
from millstream.pipelines.jobs.transform.job import TransformJob
from millstream.pipelines.jobs.transform.local_plan import LocalPlan
from millstream.pipelines.jobs.transform.prepared_query import PreparedQuery
from millstream.pipelines.jobs.transform.statement import explain_errors, relations
from millstream.pipelines.runtime.fault import Fault, fault_of
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.group_offsets import committed_offsets
from millstream_testing.committed_messages import Committed, committed_records
from millstream_testing.server import Server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WAIT_S = 60.0
# An interrupted call into the JVM leaves the session unusable, and the first calls take long on a slow machine.
pytestmark = pytest.mark.timeout(900)


class Shop:
    """Topics, and a transform between them."""

    def __init__(self, spark: SparkSession, server: Server, name: str, folder: Path) -> None:
        self.spark = spark
        self.server = server
        self.name = name
        self.orders = f"{name}-orders"
        self.into = f"{name}-into"
        self.folder = folder
        self.id = uuid.uuid4()

    def create(self, name: str, partitions: int = 2) -> None:
        admin = AdminClient({"bootstrap.servers": self.server.kafka, "log_level": 0})
        admin.create_topics([NewTopic(name, partitions, 1)])[name].result(WAIT_S)

    def publish(self, topic: str, rows: list[dict[str, Any]], partitions: int = 2) -> None:
        producer = Producer({"bootstrap.servers": self.server.kafka, "log_level": 0})
        for number, row in enumerate(rows):
            key = str(row.get("id", "")).encode()
            producer.produce(topic, json.dumps(row).encode(), key=key, partition=number % partitions)
        assert producer.flush(WAIT_S) == 0

    def pipeline(self, sql: str, **settings: str) -> Pipeline:
        overrides = {"sql": sql.replace("orders", f"`{self.orders}`"), "into": self.into, **settings}
        return Pipeline(pipeline_id=self.id, name=self.name, kind=PipelineKind.TRANSFORM, overrides=overrides)

    def context(self) -> JobContext:
        folder = str(self.folder)
        return JobContext(spark=self.spark, brokers=self.server.kafka, lake=folder, folder=folder)

    def run(self, sql: str, steps: int = 1, **settings: str) -> int:
        """Run some steps of a new job; return the number of messages processed."""
        job = TransformJob(self.pipeline(sql, **settings), self.context())
        try:
            return sum(job.step().rows for _ in range(steps))
        finally:
            job.close()

    def read(self) -> list[dict[str, Any]]:
        """The committed content of the target topic."""
        messages = committed_records(self.server.kafka, self.into)
        return [{"key": message.key, **json.loads(message.value or b"")} for message in messages]


@pytest.fixture
def shop(spark: SparkSession, server: Server, topic: str, tmp_path: Path) -> Shop:
    made = Shop(spark, server, topic[-40:], tmp_path)
    made.create(made.orders)
    return made


def orders(first: int, count: int) -> list[dict[str, Any]]:
    return [
        {"id": number, "total": number * 1.5, "customer": {"tier": "gold" if number % 3 else "silver"}, "key": "own"}
        for number in range(first, first + count)
    ]


SMALL_STATEMENTS = (
    "SELECT key, id, total * 1.19 AS gross, CAST(total AS DECIMAL(12, 3)) AS exact, customer.tier, payload_error, "
    "timestamp AS at, CAST(timestamp AS DATE) AS day FROM orders WHERE total > 3 OR total IS NULL",
    "SELECT id, item.name AS name, upper(item.name) AS loud FROM orders LATERAL VIEW explode(items) AS item",
    "SELECT value, key, headers, timestamp FROM orders WHERE partition = 1 AND offset % 2 = 0",
    "SELECT o.* FROM (SELECT * FROM orders) AS o",
)


def contents(messages: Iterable[Committed]) -> list[tuple[Any, ...]]:
    return sorted((message.value, message.key, message.headers) for message in messages)


@pytest.mark.parametrize("sql", SMALL_STATEMENTS)
def test_small_batches_are_evaluated_in_the_driver_like_in_a_job(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, sql: str
) -> None:
    rows: list[dict[str, Any]] = orders(0, 6)
    rows += [{"id": 6, "total": None, "items": [{"name": "ä"}, {"name": None}]}, {"id": 7, "items": []}, {"id": "no"}]
    shop.publish(shop.orders, rows)
    evaluated: list[int] = []
    evaluate = LocalPlan.evaluate

    def counted(plan: LocalPlan, batches: Iterable[pa.RecordBatch]) -> list[pa.RecordBatch] | None:
        results = evaluate(plan, batches)
        evaluated.append(-1 if results is None else sum(map(len, results)))
        return results

    monkeypatch.setattr(LocalPlan, "evaluate", counted)
    assert shop.run(sql) == len(rows)
    here = committed_records(shop.server.kafka, shop.into)
    assert evaluated == [len(here)]
    shop.id, shop.name, shop.into = uuid.uuid4(), f"{shop.name}-2", f"{shop.into}-2"
    monkeypatch.setattr("millstream.pipelines.jobs.transform.job.ROWS_HERE_MAX", 0)
    assert shop.run(sql) == len(rows)
    assert contents(committed_records(shop.server.kafka, shop.into)) == contents(here)
    assert len(evaluated) == 1


def test_statements_that_the_driver_cannot_evaluate_are_left_to_a_job(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.publish(shop.orders, orders(0, 4))
    sql = "SELECT id, explode(sequence(1, IF(id = 3, 40000, 1))) AS n, 1 / (id - 5) AS x FROM orders"
    job = TransformJob(shop.pipeline(sql), shop.context())
    # A few rows produce too many.
    assert job.step().counts == {"written": 40_003, "undecoded": 0}

    def changed(_plan: LocalPlan, _batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        raise TypeError("another version of Spark has no such method")

    monkeypatch.setattr(LocalPlan, "_evaluated", changed)
    shop.publish(shop.orders, orders(4, 1))
    assert job.step().counts == {"written": 1, "undecoded": 0}
    monkeypatch.undo()
    shop.publish(shop.orders, orders(5, 1))
    # An error of the statement is reported by the job.
    with pytest.raises(PySparkException, match="DIVIDE_BY_ZERO"):
        job.step()
    job.close()


def test_a_lake_table_is_joined_in_its_newest_version(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from deltalake import DeltaTable, write_deltalake

    monkeypatch.setattr("millstream.pipelines.jobs.transform.prepared_query.CHECK_INTERVAL_S", 0.0)
    table = str(shop.folder / "customers")
    shop.publish(shop.orders, orders(0, 1))
    sql = "SELECT o.id, c.discount FROM orders o JOIN customers c ON o.customer.tier = c.tier"
    tables = json.dumps({"customers": table})
    job = TransformJob(shop.pipeline(sql, tables=tables), shop.context())
    # It may be landed only later, and is waited for like a topic.
    with pytest.raises(FileNotFoundError, match=r"table 'customers' does not exist at .* yet"):
        job.step()
    DeltaTable.create(table, pa.schema([("tier", pa.string()), ("discount", pa.int64())]))
    assert job.step().rows == 1
    write_deltalake(table, pa.table({"tier": ["gold"], "discount": [10]}), mode="append")
    shop.publish(shop.orders, orders(1, 3))
    assert job.step().rows == 3
    assert sorted((row["id"], row["discount"]) for row in shop.read()) == [(1, 10), (2, 10)]
    # From here on it is too large to be broadcast by the driver.
    monkeypatch.setattr("millstream.pipelines.jobs.transform.prepared_query.HANDED_BYTES_MAX", 0)
    write_deltalake(table, pa.table({"tier": ["silver"], "discount": [5]}), mode="append")
    shop.publish(shop.orders, orders(6, 1))
    assert job.step().rows == 1
    assert (6, 5) in [(row["id"], row["discount"]) for row in shop.read()]
    job.close()
    # State kept for a table is no reason to run as a stream, at any size. Files work, too.
    files = shop.folder / "files"
    files.mkdir()
    pq.write_table(pa.table({"tier": ["gold"], "discount": [20]}), files / "one.parquet")
    both = json.dumps({"customers": table, "more": str(files)})
    sql = (
        "SELECT o.id, c.discount + m.discount AS discount FROM orders o JOIN more m ON o.customer.tier = m.tier "
        "JOIN (SELECT DISTINCT tier, discount FROM customers) c ON o.customer.tier = c.tier"
    )
    shop.publish(shop.orders, orders(7, 3))
    job = TransformJob(shop.pipeline(sql, tables=both), shop.context())
    assert job.step().rows == 3
    job.close()
    assert [row["id"] for row in shop.read() if row["discount"] == 30] == [7, 8]


def test_small_batches_are_planned_once_unless_that_would_change_their_rows(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []
    result = PreparedQuery.result

    def counted(prepared: PreparedQuery, plan: Plan) -> DataFrame:
        planned.append(plan.rows)
        return result(prepared, plan)

    monkeypatch.setattr(PreparedQuery, "result", counted)
    monkeypatch.setattr("millstream.pipelines.jobs.transform.job.ROWS_HERE_MAX", 0)
    for first, columns, is_kept in ((0, "id, total", True), (10, "id, uuid() AS word, now() AS at", False)):
        job = TransformJob(shop.pipeline(f"SELECT {columns} FROM orders"), shop.context())
        for start in (first, first + 3):
            shop.publish(shop.orders, orders(start, 3))
            assert job.step().rows == 3
        job.close()
        assert planned == ([] if is_kept else [3, 3])
    rows = shop.read()
    assert sorted(row["id"] for row in rows) == [*range(6), *range(10, 16)]
    assert len({row["word"] for row in rows if "word" in row}) == 6
    assert len({row["at"] for row in rows if "at" in row}) == 2


def test_a_dry_run_reports_everything_and_changes_nothing(shop: Shop) -> None:
    shop.publish(shop.orders, orders(0, 10))
    # The column in the second condition makes no difference, but has to exist.
    sql = "SELECT key, id, total FROM orders WHERE id < 3 AND (customer.tier IS NULL OR 1 = 1)"
    reported = dry_run(shop.pipeline(sql), shop.context())
    assert (reported["output"], reported["sampled"], reported["has_state"]) == (
        {"key": "binary", "id": "bigint", "total": "double"},
        10,
        False,
    )
    assert reported["columns"][shop.orders]["customer"] == "struct<tier:string>"
    assert sorted(row["value"] for row in reported["rows"]) == [
        '{"id":0,"total":0.0}',
        '{"id":1,"total":1.5}',
        '{"id":2,"total":3.0}',
    ]
    assert "MapInArrow" in reported["plan"]
    # Columns that are not selected are not decoded.
    assert "timestampType" not in reported["plan"]
    assert not list(shop.folder.iterdir())
    assert shop.run(sql) == 10


def test_all_columns_of_a_topic_are_its_messages_unchanged(shop: Shop) -> None:
    shop.create(shop.into)
    shop.publish(shop.orders, [{"id": number, "total": number * 10} for number in range(4)])
    assert shop.run("SELECT * FROM orders WHERE total > 10") == 4
    records = {record[2:] for record in committed_records(shop.server.kafka, shop.into)}
    published = committed_records(shop.server.kafka, shop.orders)
    assert records == {record[2:] for record in published if json.loads(record.value or b"")["total"] > 10}
    assert len(records) == 2


RECORD = "value, topic, partition, offset, timestamp, timestampType, headers, payload, payload_error"


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("WITH big AS (SELECT * FROM orders WHERE id > 0) SELECT count(*) AS n FROM big", ['{"n":5}']),
        ("SELECT DISTINCT id < 9 AS small FROM orders", ['{"small":true}']),
    ],
)
def test_stateful_statements_are_recognised(shop: Shop, sql: str, expected: list[str]) -> None:
    shop.publish(shop.orders, orders(0, 6))
    reported = dry_run(shop.pipeline(sql), shop.context())
    assert (reported["has_state"], [row["value"] for row in reported["rows"]]) == (True, expected)


@pytest.mark.trial
def test_totals_without_a_watermark_are_written_as_they_grow(shop: Shop) -> None:
    sql = (
        "WITH big AS (SELECT customer.tier AS tier, total FROM orders WHERE id > 0)"
        " SELECT tier AS key, count(*) AS n, sum(total) AS total FROM big GROUP BY tier"
    )
    job = TransformJob(shop.pipeline(sql), shop.context())
    for first in (0, 6):
        shop.publish(shop.orders, orders(first, 6))
        taken = 0
        while taken < 6:
            taken += job.step().rows
    job.close()
    totals: dict[bytes, list[tuple[int, float]]] = {}
    for row in shop.read():
        totals.setdefault(row["key"], []).append((row["n"], row["total"]))
    # The division into batches is not known, but each row counts more messages than the one before it.
    assert all(rows == sorted(set(rows)) for rows in totals.values())
    # The message that is left out is silver.
    assert {tier: rows[-1] for tier, rows in totals.items()} == {b"gold": (8, 72.0), b"silver": (3, 27.0)}


@pytest.mark.trial
def test_distinct_applies_to_all_messages_ever_received(shop: Shop) -> None:
    job = TransformJob(shop.pipeline("SELECT DISTINCT customer.tier AS tier FROM orders"), shop.context())
    # The second batch repeats the first, and the third has something new.
    for rows in (orders(1, 4), orders(1, 4), [{"id": 9, "customer": {"tier": "bronze"}}]):
        shop.publish(shop.orders, rows)
        taken = 0
        while taken < len(rows):
            taken += job.step().rows
    job.close()
    assert sorted(row["tier"] for row in shop.read()) == ["bronze", "gold", "silver"]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT c.tier, o.id FROM orders o RIGHT JOIN customers c ON o.tier = c.tier",
        "SELECT tier FROM orders UNION ALL SELECT tier FROM customers",
    ],
)
def test_rows_of_a_table_without_a_message_are_refused(shop: Shop, sql: str) -> None:
    import pyarrow as pa
    from deltalake import write_deltalake

    table = str(shop.folder / "customers")
    write_deltalake(table, pa.table({"tier": ["gold"]}))
    schemas = json.dumps({shop.orders: "id long, tier string"})
    with pytest.raises(InvalidSetting, match=r"(?i)stream"):
        shop.run(sql, tables=json.dumps({"customers": table}), schemas=schemas)


def test_unnamed_columns_are_seen_when_they_appear(shop: Shop) -> None:
    shop.publish(shop.orders, [{"id": 1, "total": 2, "tier": "gold", "large": 2**70 + 1}])
    job = TransformJob(shop.pipeline(f"SELECT * EXCEPT ({RECORD}, tier) FROM orders"), shop.context())
    assert job.step().rows == 1
    more = {"tier": "gold", "note": {"by": "me"}, "price": 5}
    shop.publish(shop.orders, [{"id": 2, "total": 3, **more}, {"id": 3, "price": 5.5}])
    taken = 0
    while taken < 2:
        # The first batch with a new field is repeated.
        taken += job.step().rows
    job.close()
    assert taken == 2
    assert sorted(shop.read(), key=lambda row: int(row["id"])) == [
        {"key": b"1", "id": 1, "total": 2, "large": 2**70 + 1},
        {"key": b"2", "id": 2, "total": 3, "note": {"by": "me"}, "price": 5.0},
        {"key": b"3", "id": 3, "price": 5.5},
    ]


def test_a_backfill_uses_the_columns_of_its_pipeline(shop: Shop) -> None:
    shop.publish(shop.orders, [{"id": 1, "n": 2}])
    sql = "SELECT id, n FROM orders"
    assert shop.run(sql) == 1
    shop.publish(shop.orders, [{"id": 2, "n": 8.5}])
    declared = shop.pipeline(sql)
    past = replace(declared, pipeline_id=uuid.uuid4(), name=f"{shop.name}-past")
    for _ in range(2):
        context = replace(shop.context(), window=TimeWindow(0, 2**50), backfilled=declared.pipeline_id)
        job = TransformJob(past, context)
        job.step()
        job.close()
    values = [message.value or b"" for message in committed_records(shop.server.kafka, shop.into)]
    assert sorted(values) == [b'{"id":1,"n":2}', b'{"id":1,"n":2}', b'{"id":2}']


def test_unreadable_messages_and_values_of_another_type_are_counted(shop: Shop) -> None:
    shop.publish(shop.orders, [{"id": 1, "code": 7}, {"id": 2, "code": "x7"}])
    producer = Producer({"bootstrap.servers": shop.server.kafka, "log_level": 0})
    producer.produce(shop.orders, b"no json", key=b"broken", partition=0)
    assert producer.flush(WAIT_S) == 0
    job = TransformJob(shop.pipeline("SELECT key, id, code, payload_error IS NULL AS good FROM orders"), shop.context())
    step = job.step()
    job.close()
    assert (step.rows, step.counts["written"], step.counts["undecoded"]) == (3, 3, 2)
    # The first value of a field decides its type.
    assert sorted(shop.read(), key=lambda row: bytes(row["key"])) == [
        {"key": b"1", "id": 1, "code": 7, "good": True},
        {"key": b"2", "id": 2, "good": False},
        {"key": b"broken", "good": False},
    ]


def test_messages_joined_with_a_table_keep_the_order_of_their_keys(shop: Shop) -> None:
    import pyarrow as pa
    from deltalake import write_deltalake

    table = str(shop.folder / "customers")
    write_deltalake(table, pa.table({"customer": list(range(1000)), "segment": [f"s{n}" for n in range(1000)]}))
    source = f"{shop.name}-events"
    shop.create(source, 3)
    rows = [{"id": f"key-{number % 300}", "n": number, "customer": number * 7 % 1000} for number in range(3000)]
    # A key is always in the same partition, as producers have it.
    shop.publish(source, rows, partitions=3)
    sql = f"SELECT e.key, e.n, c.segment FROM `{source}` e JOIN customers c ON e.customer = c.customer"
    assert shop.run(sql, tables=json.dumps({"customers": table})) == 3000
    numbers: dict[bytes, list[int]] = {}
    for row in shop.read():
        numbers.setdefault(row["key"], []).append(row["n"])
    assert numbers == {b"key-%d" % key: list(range(key, 3000, 300)) for key in range(300)}


@pytest.mark.trial
def test_windows_are_written_once_when_they_are_finished(shop: Shop) -> None:
    shop.create(shop.into)
    sql = "SELECT window.start AS at, count(*) AS n FROM orders GROUP BY window(at, '1 minute')"
    settings = {
        "schemas": json.dumps({shop.orders: "at timestamp"}),
        "watermarks": json.dumps({shop.orders: "at 10 seconds"}),
    }

    def run(rows: int, windows: int) -> None:
        job = TransformJob(shop.pipeline(sql, **settings), shop.context())
        while rows > 0 or len(shop.read()) < windows:
            rows -= job.step().rows
        job.close()
        assert rows == 0

    moments = [f"2026-11-15 12:{minute:02}:{second:02}" for minute in range(3) for second in (0, 30)]
    shop.publish(shop.orders, [{"at": moment} for moment in moments])
    # In its own thread, as the driver does it.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(run, rows=6, windows=1).result()
    # A new job continues with the state of the previous one.
    shop.publish(shop.orders, [{"at": "2026-11-15 12:01:59"}, {"at": "2026-11-15 12:10:00"}])
    run(rows=2, windows=3)
    found_rows = sorted((row["at"], row["n"]) for row in shop.read())
    assert found_rows == [(f"2026-11-15T12:0{minute}:00.000Z", 2 + (minute == 5)) for minute in range(3)]


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("INSERT INTO orders SELECT 1", "a single SELECT"),
        ("SELECT 1", "reads no topic"),
        ("SELECT id FROM a.orders", "backquotes"),
        ("SELECT id FROM orders WHERE id IN (SELECT id FROM orders)", "join it instead"),
        ("SELECT id, total AS id FROM orders", "two columns"),
        ("SELECT key FROM orders", "selects only a key"),
        ("SELECT value, id FROM orders", "not part of a message"),
        ("SELECT reflect('java.lang.System', 'getProperty', 'user.dir') AS id FROM orders", "reflect"),
        ("SELECT identifier('java_' || 'method')('java.lang.System', 'exit') AS id FROM orders", "java_method"),
        ("SELECT identifier('schema_of_' || 'xml')('<a/>', map('rowValidationXSDPath', 'x')) FROM orders", "_xml"),
        ("SELECT TRANSFORM(id) USING 'cat /etc/passwd' FROM orders", "cannot run a program"),
        ("SELECT id FROM orders, identifier('explode')(array((SELECT TRANSFORM(1) USING 'id')))", "run a program"),
        (
            "SELECT id FROM orders CROSS JOIN (SELECT max(x) OVER w FROM VALUES (1) AS t(x) "
            'WINDOW w AS (PARTITION BY (SELECT TRANSFORM(1) using /* it */ r"id" AS y)))',
            "cannot run a program",
        ),
        ("SELECT id FROM orders JOIN text.`/etc/passwd` USING (id)", "backquotes"),
        ("SELECT id FROM orders JOIN identifier('text.`/etc/passwd`') USING (id)", "backquotes"),
    ],
)
def test_invalid_statements_are_refused(shop: Shop, sql: str, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        shop.run(sql, schemas=json.dumps({shop.orders: "id long, total double"}))


def test_a_statement_does_not_see_the_environment(shop: Shop) -> None:
    shop.publish(shop.orders, orders(0, 1))
    named = ("${env:PATH}", "${system:user.dir}", "${spark:spark.app.name}")
    shop.run(f"SELECT array{named} AS named FROM orders")
    (row,) = shop.read()
    assert row["named"] == list(named)


STATEMENTS = (
    "WITH Big AS (SELECT * FROM a WHERE x IS DISTINCT FROM y), m(p) AS (TABLE big) SELECT * FROM m, b JOIN c",
    "SELECT trim(BOTH 'x' FROM s), ';' FROM (`d-e` CROSS JOIN f), range(3) LATERAL VIEW explode(y) t AS p, q -- ;",
    "SELECT window.start, count(*) FROM a GROUP BY window(at, '1 minute'), b",
    "SELECT session_window(at, '5 minutes') w, count(*) FILTER (WHERE x > 1) FROM a GROUP BY ALL",
    "(SELECT x FROM a) UNION ALL TABLE b",
    "FROM a |> WHERE x > 1 |> AGGREGATE sum(x) GROUP BY y",
    "FROM a SELECT x",
    "SELECT /*+ BROADCAST(c) */ * FROM a LEFT ANTI JOIN b AS c USING (id)",
    "SELECT transform(xs, x -> x + 1), m['k'], s.t[0].u, try_cast(x AS int) FROM a TABLESAMPLE (10 PERCENT)",
    "SELECT * FROM a PIVOT (sum(x) FOR y IN ('a', 'b'))",
    "SELECT x, row_number() OVER (PARTITION BY k ORDER BY t DESC NULLS LAST) r FROM a LIMIT 5",
    "SELECT * EXCEPT (x), INTERVAL 10 MINUTES + at, date'2020-01-01' FROM a NATURAL JOIN `b.c`",
    "SELECT CASE WHEN x THEN 1 END, x <=> y, x DIV 2 FROM a WHERE EXISTS (SELECT 1 FROM b WHERE b.x = a.x)",
    "SELECT extract(year FROM t), substring(s FROM 2), overlay(s PLACING r FROM 3) FROM o",
    "SELECT from_json(payload, 'a INT') p, to_json(struct(*)) value FROM a, LATERAL explode(x) AS t(y)",
    "SELECT ';', 'it''s FROM x', r'\\', \"FROM y\" FROM a -- FROM b;\n /* FROM /* c */ */",
    "SELECT x FROM a GROUP BY GROUPING SETS ((x), (y)) HAVING count(*) > 1 ORDER BY x",
)
BROKEN_STATEMENTS = (
    "SELECT x,\n  (y FROM a",
    "SELECT y) FROM a",
    "SELECT 'y FROM a",
    "SELECT y FROM a /* b",
    "SELECT * FROM orders-eu.x o",
    "SELECT * FROM größen",
)


@pytest.mark.parametrize("sql", STATEMENTS)
def test_nodes_find_the_relations_that_spark_finds(spark: SparkSession, sql: str) -> None:
    parser: Any = spark._jsparkSession.sessionState().sqlParser()
    own: set[str] = set()
    names = {name for name, _ in relations(parser.parseQuery(sql), own, is_hidden=False)}
    statement = read_select(sql)
    assert statement.is_complete
    assert set(statement.reads) == {name for name in names if name.lower() not in own}


@pytest.mark.parametrize("sql", BROKEN_STATEMENTS)
def test_spark_refuses_the_statements_that_nodes_refuse(spark: SparkSession, sql: str) -> None:
    parser: Any = spark._jsparkSession.sessionState().sqlParser()
    with pytest.raises(InvalidSetting):
        read_select(sql)
    with pytest.raises(InvalidSetting):
        explain_errors(sql, lambda: parser.parseQuery(sql))


@pytest.mark.usefixtures("spark")
def test_nodes_read_columns_as_spark_does() -> None:
    text = (
        "a long, `b c`: array<struct<d:decimal(5,2), e numeric>> NOT NULL COMMENT 'x', order map<string, timestamp>,"
        "f real, g struct<h byte, i short>, j integer, k timestamp_ltz, l timestamp_ntz, m date, n binary /* x */"
    )
    assert StructType.fromDDL(text).simpleString() == f"struct<{simple_text(parse_columns(text))}>"


def simple_text(columns: Iterable[PayloadColumn]) -> str:
    """Columns as Spark prints them."""
    return ",".join(f"{column.name}:{simple_type(column.type)}" for column in columns)


def simple_type(kind: ColumnType) -> str:
    if kind.numbers:
        return f"{kind.name}({','.join(map(str, kind.numbers))})"
    if kind.name == "struct":
        return f"struct<{simple_text(kind.parts)}>"
    parts = ",".join(simple_type(part.type) for part in kind.parts)
    return f"{kind.name}<{parts}>" if parts else kind.name


async def test_rows_and_offsets_are_committed_together(shop: Shop) -> None:
    # A statement in a file may end with a semicolon.
    sql = "SELECT key, id, total * 2 AS double, customer.tier AS tier, payload_key FROM orders WHERE id % 2 = 0;"
    shop.publish(shop.orders, orders(0, 100))
    assert shop.run(sql) == 100
    rows = sorted(shop.read(), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(0, 100, 2))
    assert rows[1] == {"key": b"2", "id": 2, "double": 6.0, "tier": "gold", "payload_key": "own"}
    shop.publish(shop.orders, orders(100, 50))
    # A new job, as after a crash: it continues where the previous one ended.
    assert shop.run(sql, steps=2) == 50
    assert sorted(row["id"] for row in shop.read()) == list(range(0, 150, 2))
    async with Client.connect(shop.server.kafka) as client:
        committed = await committed_offsets(client, f"pipeline-{shop.name}")
    assert sum(committed.values()) == 150


def test_an_invalid_statement_is_reported_with_its_position(shop: Shop) -> None:
    shop.publish(shop.orders, orders(0, 2))
    with pytest.raises(InvalidSetting, match=r"(?s)UNRESOLVED_COLUMN.*line 1, column 8"):
        shop.run("SELECT totl FROM orders")
    with pytest.raises(InvalidSetting, match="PARSE_SYNTAX_ERROR"):
        shop.run("SELECT id FROM orders WHERE WHERE id > 1 1")


class RoutedTopic:
    """A topic, and a route from it."""

    def __init__(self, spark: SparkSession, server: Server, name: str) -> None:
        self.spark = spark
        self.server = server
        self.name = name
        self.orders = f"{name}-orders"
        self.id = uuid.uuid4()
        admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
        admin.create_topics([NewTopic(self.orders, 2, 1)])[self.orders].result(WAIT_S)

    def publish(self, first: int, count: int) -> None:
        producer = Producer({"bootstrap.servers": self.server.kafka, "log_level": 0})
        for number in range(first, first + count):
            value = json.dumps({"id": number, "region": ("eu", "us", "asia")[number % 3]}).encode()
            headers: list[tuple[str, str | bytes | None]] = [("tier", b"gold" if number % 2 else b"silver")]
            producer.produce(
                self.orders,
                value,
                key=b"%d" % number,
                headers=headers,
                partition=number % 2,
                timestamp=1_700_000_000_000 + number,
            )
        assert producer.flush(WAIT_S) == 0

    def rule(self, name: str, condition: str, *targets: str, subscription: str = "") -> Rule:
        named = tuple(f"{self.name}-{target}" for target in targets)
        return Rule(name=name, topic=self.orders, targets=named, condition=condition, subscription=subscription)

    def run(self, *rules: Rule, steps: int = 1) -> int:
        """Run some steps of a new job; return the number of messages processed."""
        pipeline = Pipeline(pipeline_id=self.id, name=self.name, kind=PipelineKind.ROUTE, overrides={})
        context = JobContext(spark=self.spark, brokers=self.server.kafka, lake="", folder="", rules=rules)
        job = RouteJob(pipeline, context)
        try:
            return sum(job.step().rows for _ in range(steps))
        finally:
            job.close()

    def messages(self, target: str) -> list[Committed]:
        return committed_records(self.server.kafka, f"{self.name}-{target}")

    def ids(self, target: str) -> list[int]:
        return sorted(json.loads(message.value or b"")["id"] for message in self.messages(target))


@pytest.fixture
def routed(spark: SparkSession, server: Server, topic: str) -> RoutedTopic:
    return RoutedTopic(spark, server, topic[-40:])


def test_every_target_has_its_messages_once_and_rules_change_between_batches(routed: RoutedTopic) -> None:
    routed.publish(0, 60)
    europe = routed.rule("europe", "payload.region = 'eu'", "europe", "both")
    gold = routed.rule("gold", "headers['tier'] = 'gold' AND payload.id >= 30", "gold", "both")
    everything = routed.rule("all", "", "all")
    assert routed.run(europe, gold, everything) == 60
    assert routed.ids("europe") == list(range(0, 60, 3))
    assert routed.ids("gold") == list(range(31, 60, 2))
    assert routed.ids("both") == sorted({*range(0, 60, 3), *range(31, 60, 2)})
    assert routed.ids("all") == list(range(60))
    first = next(message for message in routed.messages("gold") if message.key == b"31")
    assert (first.headers, first.timestamp_ms) == ((("tier", b"gold"),), 1_700_000_000_031)
    routed.publish(60, 30)
    asia = routed.rule("asia", "payload.region = 'asia'", "asia")
    # A missing topic blocks no other.
    later = Rule(name="later", topic=f"{routed.name}-later", targets=(f"{routed.name}-late",))
    # A new job with other rules, as the driver creates when they change.
    assert routed.run(asia, gold, later, steps=2) == 30
    assert routed.ids("asia") == list(range(62, 90, 3))
    assert routed.ids("gold") == list(range(31, 90, 2))
    assert routed.ids("all") == list(range(60))


async def test_a_rule_can_use_the_filter_of_a_subscription(routed: RoutedTopic) -> None:
    routed.publish(0, 12)
    async with Client.connect(routed.server.kafka) as client:
        settings = {"millstream.filter": "payload.region = 'us'"}
        await SubscriptionClient(client).create(f"{routed.name}-sub", [routed.orders], settings)
    assert routed.run(routed.rule("theirs", "", "theirs", subscription=f"{routed.name}-sub")) == 12
    assert routed.ids("theirs") == [1, 4, 7, 10]
    with pytest.raises(UnknownGroup, match="nobody"):
        routed.run(routed.rule("theirs", "", "theirs", subscription="nobody"))
    with pytest.raises(UnknownTopic, match="later"):
        routed.run(Rule(name="later", topic=f"{routed.name}-later", targets=(f"{routed.name}-late",)))


def test_an_invalid_condition_is_reported_before_anything_is_routed(routed: RoutedTopic) -> None:
    routed.publish(0, 3)
    with pytest.raises(FilterError, match="did you mean 'key'"):
        routed.run(routed.rule("broken", "kye = 'a'", "never"))


PRICES = """from __future__ import annotations

RATE = 2


def gross(total: float | None) -> float | None:
    return None if total is None else total * RATE


def words(n: int) -> 'array<string>':
    return ['a'] * n
"""
TEXTS = """from pyspark.sql.functions import pandas_udf


@pandas_udf('string')
def shout(s):
    return s.str.upper()
"""


BROKEN = """from collections.abc import Iterator

import pandas
from pyspark.sql.functions import pandas_udf


def inverse(n: int) -> float:
    return 1 / n


def fetched(n: int) -> str:
    raise ConnectionError('nobody responds')


@pandas_udf('double')
def inverses(numbers: Iterator[pandas.Series]) -> Iterator[pandas.Series]:
    for one in numbers:
        yield one.map(lambda n: 1 // n)
"""


@pytest.mark.parametrize(
    ("call", "fault", "reason"),
    [
        ("inverse(id)", Fault.DECLARED, "ZeroDivisionError: division by zero"),
        ("inverses(id)", Fault.DECLARED, "ZeroDivisionError: integer division or modulo by zero"),
        ("fetched(id)", Fault.OUTSIDE, "ConnectionError: nobody responds"),
    ],
)
def test_an_error_of_a_function_is_the_declarations_unless_a_service_is_away(
    shop: Shop, call: str, fault: Fault, reason: str
) -> None:
    settings: dict[str, Any] = {
        "functions": "broken:" + call.partition("(")[0],
        "functions.code": json.dumps({"broken": BROKEN}),
    }
    shop.publish(shop.orders, orders(0, 1))
    with pytest.raises(Exception, match=re.escape(reason)) as raised:
        shop.run(f"SELECT id, {call} AS found FROM orders", **settings)
    assert fault_of(raised.value) is fault
    assert reason_of(raised.value).endswith(reason)


def test_a_statement_calls_python_functions(shop: Shop) -> None:
    code = {"prices": PRICES, "texts": TEXTS}
    settings: dict[str, Any] = {
        "functions": "prices:gross, prices:words, texts:shout",
        "functions.code": json.dumps(code),
    }
    shop.publish(shop.orders, orders(0, 4))
    sql = (
        "SELECT id, gross(total) AS gross, size(words(id)) AS n, shout(customer.tier) AS tier FROM orders WHERE id > 0"
    )
    assert shop.run(sql, **settings) == 4
    assert sorted((row["id"], row["gross"], row["n"], row["tier"]) for row in shop.read()) == [
        (1, 3.0, 1, "GOLD"),
        (2, 6.0, 2, "GOLD"),
        (3, 9.0, 3, "SILVER"),
    ]
