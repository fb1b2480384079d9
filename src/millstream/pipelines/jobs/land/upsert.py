"""Landing with one row per key: staged changes are merged into the buckets of a table by Spark tasks.

Everything else is as in landing: the table says where a step starts, and its commit carries the next offsets.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Final

import pyarrow as pa

from millstream.core.errors import InvalidSetting
from millstream.core.pipeline import NO_DECODING
from millstream.pipelines.jobs.land.changes import ChangeRule
from millstream.pipelines.jobs.land.inference import KEYED_NAMES, column_of
from millstream.pipelines.jobs.land.job import LandJob
from millstream.pipelines.jobs.land.sources import MESSAGE_BYTES, Source
from millstream.pipelines.jobs.land.task import Report
from millstream.pipelines.jobs.land.topic_batch import TopicBatch
from millstream.pipelines.lake.columns import RAW, TOPIC_ID, FieldPath
from millstream.pipelines.lake.keyed_table import BucketMerge, KeyedTable, merge_result
from millstream.pipelines.lake.merging import MergeRule
from millstream.pipelines.lake.storage import Storage

_DECODED: Final = pa.schema([RAW.field(name) for name in (*KEYED_NAMES, TOPIC_ID)])
_RAW: Final = pa.schema([RAW.field(name) for name in (*KEYED_NAMES, "value", "headers", TOPIC_ID)])


class UpsertJob(LandJob):
    """A pipeline that keeps one row per key."""

    # Every step replaces files, so old ones accumulate fastest while it catches up.
    _tidies_always = True

    def _open(self, topic: str) -> KeyedTable:
        storage = Storage.at(f"{self._lake}/{topic}", self._storage_options())
        return KeyedTable(storage, replaced_retention=timedelta(milliseconds=self._settings.replaced_retention_ms))

    def _batch(self, source: Source) -> TopicBatch:
        batch = super()._batch(source)
        batch.record = _RAW if self._settings.decode == NO_DECODING else _DECODED
        batch.changes = ChangeRule.of(self._settings, source.topic)
        self._check_partitions(batch)
        keyed(batch).stored()
        return batch

    def _check_partitions(self, batch: TopicBatch) -> None:
        """Raise `InvalidSetting` if partitions were added: a key may then be in two, and offsets do not order them."""
        known = [number for number, plan in batch.plans.items() if plan.start is not None]
        added = [number for number, plan in batch.plans.items() if plan.start is None]
        if not self._settings.order_by and known and added:
            raise InvalidSetting(
                f"topic {batch.topic!r} had {len(known)} partitions when its table began and has {len(batch.plans)} "
                "now: a key may be in two of them, and offsets do not say which of its changes is newer; name a field "
                "that does with order.by (--order-by), or build the table again from a separate topic"
            )

    def _run(self, batches: Sequence[TopicBatch]) -> None:
        for batch in batches:
            messages = sum(len(topic_range) for topic_range in batch.topic_ranges())
            size = self._message_bytes.get(batch.topic, MESSAGE_BYTES)
            keyed(batch).route(messages * size, self._settings.bucket_bytes)
        super()._run(batches)
        for batch in batches:
            self._merge(batch)

    def _merge(self, batch: TopicBatch) -> None:
        """Merge the staged changes of a topic; its reports then name the files of buckets."""
        staged = [file for report in batch.reports for file in report.files]
        rule = batch.changes
        if not staged or rule is None:
            return
        table = keyed(batch)
        schema = batch.table_schema()
        units = table.begin_merge(staged, batch.moves(), schema)
        work = BucketMerge(
            storage=table.storage,
            schema=schema,
            rule=MergeRule(
                topic_id=batch.source.topic_id,
                key=tuple(".".join(place) for place in rule.key),
                is_ordered=rule.order is not None,
                now_ms=int(time.time() * 1000),
                remembered_ms=self._settings.delete_retention_ms,
            ),
            key=tuple(_column(place) if rule.key else place for place in rule.stored_key),
            order=None if rule.order is None else _column(rule.order),
        )
        results = [merge_result(text) for text in self._with_files(work, units).values()]
        counts: Counter[str] = Counter()
        for result in results:
            counts.update(upserted=result.upserted, deleted=result.deleted, late=result.late)
        batch.merged = counts
        merged = Report(topic=batch.topic, files=tuple(file for result in results for file in result.files))
        batch.reports = [*(replace(report, files=()) for report in batch.reports), merged]
        table.discard(staged)


def keyed(batch: TopicBatch) -> KeyedTable:
    if not isinstance(batch.table, KeyedTable):
        raise TypeError(f"the table of {batch.topic!r} has no keys")
    return batch.table


def _column(path: FieldPath) -> FieldPath:
    """Return the path in the table of a path in payloads."""
    return (column_of(path[0]), *path[1:])
