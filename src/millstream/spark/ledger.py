"""The ledger as views for DuckDB and Spark: `ledger_events`, `ledger_messages` and `ledger_minutes`.

    from millstream.spark.ledger import duckdb_views

    duckdb_views(connection, "/lake")
    connection.sql("SELECT * FROM ledger_messages WHERE topic = 'orders' AND outcome = 'dead_lettered'")

The views are SQL over the events as they were landed; the two engines differ in a few functions only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from millstream.pipelines.jobs.ledger.table import NAME

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ENDS: Final = "'accepted', 'dead_lettered', 'dropped', 'filtered', 'retention_cut'"
_LIVES: Final = f"{_ENDS}, 'scanned', 'acquired', 'released', 'expired', 'rejecting', 'revived'"

_MESSAGES: Final = """
CREATE OR REPLACE {temporary} VIEW ledger_messages AS
WITH lives AS (
  SELECT *, {unnested} AS message_offset, state_offset * 1048576 + row AS place
  FROM ledger_events WHERE kind IN ({lives}) AND end_offset > "offset"
)
SELECT
  subscription, subscription_id, topic, topic_id, partition, message_offset AS "offset",
  max(published) AS published,
  min("timestamp") FILTER (WHERE kind = 'acquired') AS first_delivery,
  max(attempt) AS attempts,
  {attempts} AS deliveries,
  CASE WHEN max_by(kind, place) IN ({ends}) THEN max_by(kind, place) ELSE 'unfinished' END AS outcome,
  CASE WHEN max_by(kind, place) IN ({ends}) THEN max("timestamp") END AS ended,
  max_by(worker, place) FILTER (WHERE worker IS NOT NULL) AS worker,
  max_by(endpoint, place) FILTER (WHERE endpoint IS NOT NULL) AS endpoint,
  max_by(reason, place) FILTER (WHERE reason IS NOT NULL) AS reason,
  max(letter_topic) AS letter_topic, max(letter_partition) AS letter_partition, max(letter_offset) AS letter_offset
FROM lives
GROUP BY subscription, subscription_id, topic, topic_id, partition, message_offset
"""

_MINUTES: Final = """
CREATE OR REPLACE {temporary} VIEW ledger_minutes AS
WITH moves AS (
  SELECT subscription, topic, date_trunc('minute', "timestamp") AS minute,
    sum(CASE WHEN kind = 'scanned' THEN end_offset - "offset" ELSE 0 END) AS arrived,
    sum(CASE WHEN kind = 'acquired' THEN end_offset - "offset" ELSE 0 END) AS delivered,
    sum(CASE WHEN kind = 'accepted' THEN end_offset - "offset" ELSE 0 END) AS accepted,
    sum(CASE WHEN kind = 'dead_lettered' THEN end_offset - "offset" ELSE 0 END) AS dead_lettered,
    sum(CASE WHEN kind IN ('released', 'expired') THEN end_offset - "offset" ELSE 0 END) AS failed,
    sum(CASE WHEN kind = 'revived' THEN end_offset - "offset" ELSE 0 END)
      - sum(CASE WHEN kind IN ({ends}, 'absent') THEN end_offset - "offset" ELSE 0 END) AS unfinished
  FROM ledger_events WHERE kind IN ({lives}, 'absent') GROUP BY 1, 2, 3
), waits AS (
  SELECT subscription, topic, date_trunc('minute', ended) AS minute,
    {milliseconds} AS wait_ms
  FROM ledger_messages WHERE outcome = 'accepted' AND published IS NOT NULL
), latencies AS (
  SELECT subscription, topic, minute,
    {percentile}(wait_ms, 0.5) AS latency_ms_p50,
    {percentile}(wait_ms, 0.95) AS latency_ms_p95,
    {percentile}(wait_ms, 0.99) AS latency_ms_p99
  FROM waits GROUP BY subscription, topic, minute
)
SELECT moves.subscription, moves.topic, moves.minute, arrived, delivered, accepted, dead_lettered, failed,
  sum(arrived + unfinished) OVER (PARTITION BY moves.subscription, moves.topic ORDER BY moves.minute) AS lag,
  latency_ms_p50, latency_ms_p95, latency_ms_p99
FROM moves LEFT JOIN latencies
  ON latencies.subscription = moves.subscription AND latencies.topic = moves.topic AND latencies.minute = moves.minute
"""

_ATTEMPT: Final = (
    '"timestamp" := "timestamp", kind := kind, attempt := attempt, worker := worker, endpoint := endpoint, '
    "reason := reason"
)
_TRIED: Final = "kind IN ('acquired', 'released', 'expired', 'rejecting', 'accepted')"

_DUCKDB: Final = {
    "temporary": "",
    "unnested": 'unnest(range("offset", end_offset))',
    "attempts": f"list(struct_pack({_ATTEMPT}) ORDER BY place) FILTER (WHERE {_TRIED})",
    "milliseconds": "date_diff('millisecond', published, ended)",
    "percentile": "quantile_cont",
}
_SPARK: Final = {
    "temporary": "TEMPORARY",
    "unnested": 'explode(sequence("offset", end_offset - 1))',
    "attempts": (
        'transform(array_sort(collect_list(struct(place, "timestamp", kind, attempt, worker, endpoint, reason)) '
        f'FILTER (WHERE {_TRIED})), one -> struct(one."timestamp", one.kind, one.attempt, one.worker, '
        "one.endpoint, one.reason))"
    ),
    "milliseconds": "timestampdiff(MILLISECOND, published, ended)",
    "percentile": "percentile",
}


def _statements(engine: dict[str, str]) -> list[str]:
    return [text.format(**engine, ends=_ENDS, lives=_LIVES) for text in (_MESSAGES, _MINUTES)]


def duckdb_views(connection: Any, lake: str) -> None:
    """Create the views in a DuckDB connection, over the ledger of a lake as it is now."""
    import deltalake

    connection.register("ledger_events", deltalake.DeltaTable(_place(lake)).to_pyarrow_dataset())
    for statement in _statements(_DUCKDB):
        connection.execute(statement)


def spark_views(spark: SparkSession, lake: str) -> None:
    """Create the views in a Spark session, over the ledger of a lake as it is now."""
    import deltalake

    table = deltalake.DeltaTable(_place(lake))
    events = spark.read.option("basePath", table.table_uri).parquet(*table.file_uris())
    events.createOrReplaceTempView("ledger_events")
    for statement in _statements(_SPARK):
        spark.sql(statement.replace('"', "`"))


def _place(lake: str) -> str:
    return f"{lake.rstrip('/')}/{NAME}"
