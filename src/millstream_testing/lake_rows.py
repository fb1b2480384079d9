"""Rows for lake tables, and checks of what a table contains, for tests."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq

from millstream.pipelines.lake.columns import QUARANTINE, RAW, file_schema
from millstream.pipelines.lake.rewriting import FileWork
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import LakeTable, TopicPartition
from millstream.pipelines.lake.table_file import ActiveFile, WrittenFile

TOPIC: Final = "3f2b8c1e-0000-4000-8000-000000000001"
LANDED: Final = datetime(2026, 11, 15, 21, 30, tzinfo=UTC)


def rows(partition: int, offsets: Iterable[int], schema: pa.Schema = RAW, **columns: Any) -> pa.RecordBatch:
    """Return messages of one partition, with additional columns by name as lists."""
    numbers = list(offsets)
    made: dict[str, Any] = {
        "partition": [partition] * len(numbers),
        "offset": numbers,
        "timestamp": [1_790_000_000_000_000 + 1_001 * number for number in numbers],
        "key": [b"k%d" % (number % 7) for number in numbers],
        "value": [b"value-%d-%d" % (partition, number) for number in numbers],
        "headers": [[{"key": "h", "value": b"%d" % number}] if number % 3 == 0 else [] for number in numbers],
    }
    if "timestamp_type" in schema.names:
        made["timestamp_type"] = [0] * len(numbers)
    if "reason" in schema.names:
        made["reason"] = ["made up"] * len(numbers)
    made.update(columns)
    fields = [field for field in file_schema(schema) if field.name in made]
    return pa.RecordBatch.from_pydict({field.name: made[field.name] for field in fields}, schema=pa.schema(fields))


def write(
    table: LakeTable, batches: Sequence[pa.RecordBatch], schema: pa.Schema = RAW, **how: Any
) -> list[WrittenFile]:
    """Write files for a table, as a task does."""
    writer = table.writer(schema, TOPIC, landed=how.get("landed", LANDED))
    for batch in batches:
        writer.write(batch)
    return writer.close()


def write_quarantine(table: LakeTable, partition: int, offsets: Iterable[int]) -> list[WrittenFile]:
    writer = table.quarantine_writer(TOPIC, landed=LANDED)
    writer.write(rows(partition, offsets, QUARANTINE))
    return writer.close()


def land(table: LakeTable, partition: int, start: int, end: int) -> bool:
    files = write(table, [rows(partition, range(start, end))])
    return table.commit(files, {(TOPIC, partition): (start, end)}, schema=RAW)


def in_this_process(work: FileWork[ActiveFile], files: Sequence[ActiveFile]) -> dict[str, str]:
    """Process files as tasks do."""
    return {file.path: pickle.loads(pickle.dumps(work))(file) for file in files}


def next_offset(table: LakeTable, partition: int = 0) -> int:
    """Return where a partition continues; 0 before it begins."""
    key: TopicPartition = (TOPIC, partition)
    return table.next_offsets([key]).get(key, 0)


def delta_rows(storage: Storage) -> Counter[tuple[int, int]]:
    """Count how often a Delta table has each partition and offset, as any reader of Delta sees it."""
    table = deltalake.DeltaTable(storage.url, storage_options=dict(storage.options))
    found = pa.table(table.scan(columns=["partition", "offset"]).read_all())
    return Counter(zip(found.column("partition").to_pylist(), found.column("offset").to_pylist(), strict=True))


def files_rows(storage: Storage) -> Counter[tuple[int, int]]:
    """Count how often the files of a folder have each partition and offset, as any reader of Parquet sees it."""
    files = storage.files()
    found: Counter[tuple[int, int]] = Counter()
    for path in storage.data_files():
        table = pq.ParquetFile(files.open_input_file(path)).read(columns=["partition", "offset"])
        found.update(zip(table.column("partition").to_pylist(), table.column("offset").to_pylist(), strict=True))
    return found


def once(partition: int, offsets: Iterable[int]) -> Counter[tuple[int, int]]:
    return Counter((partition, offset) for offset in offsets)
