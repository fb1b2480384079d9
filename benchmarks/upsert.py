"""`make bench-upsert`: what a batch of changes to random keys costs a table with one row per key.

    python -m benchmarks.upsert [--keys N]… [--changes N]… [--bucket-bytes N] [--out FILE]

Every batch is staged, merged and committed by the code that Spark's tasks run, one bucket after the other in this
process, and then by `MERGE` of `deltalake` into a table of the same rows. Write amplification is the bytes written for
each byte of changed rows, as the table stores them. CPU seconds are user and system time of this process.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import deltalake
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from benchmarks import machine
from benchmarks.report import Table
from rich.console import Console

from millstream.pipelines.lake.columns import RAW
from millstream.pipelines.lake.keyed_table import BucketMerge, KeyedTable, merge_result
from millstream.pipelines.lake.merging import DELETED, KEY, ORDER, MergeRule, canonical_keys
from millstream.pipelines.lake.storage import Storage

OUT: Final = Path("build/bench/upsert.md")
TOPIC: Final = str(uuid.UUID(int=1))
LOAD_ROWS: Final = 1_000_000
RAW_BYTES: Final = 100.0
"""The assumed size of a message, used to split buckets in advance."""
SCHEMA: Final = pa.schema(
    [
        *(RAW.field(name) for name in ("partition", "offset", "timestamp", "key", "topic_id")),
        pa.field("id", pa.int64()),
        pa.field("name", pa.string()),
        pa.field("amount", pa.float64()),
        pa.field("at", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True)
class Cost:
    files: int
    written: int
    wall_s: float
    cpu_s: float


class Keyed:
    """The table under test, and the log of changes."""

    def __init__(self, folder: Path, bucket_bytes: int) -> None:
        self.table = KeyedTable(Storage.at(str(folder)))
        self._bucket_bytes = bucket_bytes
        self._offset = 0

    def merge(self, rows: pa.RecordBatch) -> Cost:
        """Merge one batch, as a step of a pipeline does."""
        began, cpu = time.perf_counter(), time.process_time()
        place = (TOPIC, 0)
        start = self.table.next_offsets([place]).get(place, 0)
        moves = {place: (start, start + len(rows))}
        self.table.route(len(rows) * RAW_BYTES, self._bucket_bytes)
        writer = self.table.writer(SCHEMA, TOPIC, attempt=uuid.uuid4().hex[:16])
        keys = canonical_keys([rows.column("id")])
        changes = rows.append_column(KEY, keys).append_column(ORDER, rows.column("at"))
        writer.write(changes.append_column(DELETED, pa.array(np.zeros(len(rows), np.bool_))))
        staged = writer.close()
        rule = MergeRule(topic_id=TOPIC, key=("id",), is_ordered=True, now_ms=0, remembered_ms=0)
        work = BucketMerge(storage=self.table.storage, schema=SCHEMA, rule=rule, key=(("id",),), order=("at",))
        units = self.table.begin_merge(staged, moves, SCHEMA)
        files = [file for unit in units for file in merge_result(work(unit)).files]
        if not self.table.commit(files, moves, schema=SCHEMA):
            raise SystemExit("a commit was refused")
        self.table.discard(staged)
        size = sum(file.bytes for file in files)
        return Cost(len(files), size, time.perf_counter() - began, time.process_time() - cpu)


def changes(ids: np.ndarray[tuple[int], np.dtype[np.int64]], moment: int) -> pa.RecordBatch:
    """Return one change for each key."""
    count = len(ids)
    texts = pa.array(ids).cast(pa.string())
    return pa.RecordBatch.from_pydict(
        {
            "partition": pa.array(np.zeros(count, np.int32)),
            "offset": pa.array(np.arange(moment * LOAD_ROWS, moment * LOAD_ROWS + count)),
            "timestamp": pa.array(np.full(count, moment * 1_000_000), pa.timestamp("us", tz="UTC")),
            "key": texts.cast(pa.binary()),
            "id": pa.array(ids),
            "name": pc.binary_join_element_wise("customer ", texts, f" at {moment}", ""),
            "amount": pa.array(np.random.default_rng(moment).random(count)),
            "at": pa.array(np.full(count, moment, np.int64)),
        }
    )


def by_library(folder: Path, rows: pa.RecordBatch) -> Cost:
    """Merge a batch with `deltalake` alone."""
    began, cpu = time.perf_counter(), time.process_time()
    table = deltalake.DeltaTable(str(folder))
    before = set(table.file_uris())
    merging = table.merge(pa.Table.from_batches([rows]), predicate="t.id = s.id", source_alias="s", target_alias="t")
    merging.when_matched_update_all(predicate="s.at >= t.at").when_not_matched_insert_all().execute()
    new = set(deltalake.DeltaTable(str(folder)).file_uris()) - before
    size = sum(Path(uri.removeprefix("file://")).stat().st_size for uri in new)
    return Cost(len(new), size, time.perf_counter() - began, time.process_time() - cpu)


def measure(keys: int, batches: list[int], bucket_bytes: int, report: Callable[[list[str]], None]) -> None:
    """Build a table and measure batches of random keys."""
    folder = Path(tempfile.mkdtemp(prefix="millstream-upsert-"))
    try:
        keyed = Keyed(folder / "keyed", bucket_bytes)
        ids = np.random.default_rng(1).permutation(keys).astype(np.int64)
        for number, start in enumerate(range(0, keys, LOAD_ROWS)):
            rows = changes(ids[start : start + LOAD_ROWS], number)
            keyed.merge(rows)
            deltalake.write_deltalake(str(folder / "library"), pa.Table.from_batches([rows]), mode="append")
        stored = keyed.table.stored()
        size = sum(file.bytes for file in stored)
        for number, count in enumerate(batches):
            chosen = np.random.default_rng(number).choice(keys, count, replace=False).astype(np.int64)
            rows = changes(chosen, 1000 + number)
            own, library = keyed.merge(rows), by_library(folder / "library", rows)
            changed = size / keys * count
            report(
                [
                    f"{keys:,}",
                    f"{size / 1e6:,.0f} MB in {len(stored)}",
                    f"{count:,}",
                    f"{own.files}",
                    f"{own.written / 1e6:,.0f} MB",
                    f"{own.written / changed:,.1f}",
                    f"{own.wall_s:,.1f} s ({own.cpu_s:,.1f})",
                    f"{library.written / 1e6:,.0f} MB",
                    f"{library.wall_s:,.1f} s ({library.cpu_s:,.1f})",
                ]
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, action="append", help="keys of a table; may be repeated")
    parser.add_argument("--changes", type=int, action="append", help="changes of a batch; may be repeated")
    parser.add_argument("--bucket-bytes", type=int, default=32 * 1024 * 1024)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    table = Table(
        "Batches of changes to random keys",
        [
            "keys",
            "table, files",
            "changes",
            "files rewritten",
            "written",
            "write amplification",
            "time (CPU)",
            "deltalake MERGE: written",
            "time (CPU)",
        ],
        words=0,
    )
    for keys in options.keys or [100_000, 1_000_000]:
        sizes = [count for count in options.changes or [10, 1_000, 100_000, 1_000_000] if count <= keys]
        measure(keys, sizes, options.bucket_bytes, table.rows.append)
        Console(file=sys.stderr).print(f"{keys:,} keys measured")
    Console().print(table.rich())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(f"{table.markdown()}\n{machine.facts()}\n")


if __name__ == "__main__":
    main()
