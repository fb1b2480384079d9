"""A table with one row per key, with interrupted, repeated and concurrent steps, compared with a model."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest

from millstream.core.errors import CorruptState, InvalidSetting, StalePlan
from millstream.pipelines.lake.columns import RAW
from millstream.pipelines.lake.keyed_table import BucketMerge, KeyedTable, merge_result
from millstream.pipelines.lake.merging import DELETED, KEY, ORDER, MergeRule
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import open_table
from millstream.pipelines.lake.table_file import WrittenFile
from millstream_testing.lake_rows import land

TOPIC = "00000000-0000-0000-0000-000000000001"
SCHEMA = pa.schema(
    [RAW.field(name) for name in ("partition", "offset", "timestamp", "key", "topic_id")]
    + [pa.field("name", pa.string()), pa.field("at", pa.int64())]
)
BUCKET_BYTES = 3000
Change = tuple[int, int | None, bool]
"""A key, its order value if it has one, and whether it is a delete; its offset is its position."""


class Step:
    """One step of a run, split so that it can stop after any part."""

    def __init__(self, folder: Path, log: Sequence[Change], end: int, schema: pa.Schema = SCHEMA) -> None:
        self.table = KeyedTable(Storage.at(str(folder)))
        self._log = log
        self._schema = schema
        place = (TOPIC, 0)
        self._start = self.table.next_offsets([place]).get(place, 0)
        self._end = max(self._start, end)
        self._moves = {place: (self._start, self._end)}
        self.staged: list[WrittenFile] = []
        self.files: list[WrittenFile] = []

    def stage(self) -> None:
        self.table.route((self._end - self._start) * 100.0, BUCKET_BYTES)
        writer = pickle.loads(pickle.dumps(self.table.writer(self._schema, TOPIC, attempt="0123456789abcdef")))
        rows = [
            {
                "partition": 0,
                "offset": offset,
                "name": f"{key}-{offset}",
                "key": str(key).encode(),
                "at": at,
                KEY: str(key).encode(),
                ORDER: at,
                DELETED: is_delete,
            }
            for offset, (key, at, is_delete) in enumerate(self._log)
            if self._start <= offset < self._end
        ]
        extra = [pa.field(KEY, pa.binary()), pa.field(ORDER, pa.int64()), pa.field(DELETED, pa.bool_())]
        fields = [field for field in self._schema if field.name != "topic_id"]
        writer.write(pa.RecordBatch.from_pylist(rows, schema=pa.schema([*fields, *extra])))
        self.staged = writer.close()

    def merge(self) -> None:
        if not self.staged:
            return
        units = self.table.begin_merge(self.staged, self._moves, self._schema)
        rule = MergeRule(topic_id=TOPIC, key=(), is_ordered=True, now_ms=0, remembered_ms=10**9)
        work = BucketMerge(storage=self.table.storage, schema=self._schema, rule=rule, key=(("key",),), order=("at",))
        for unit in units:
            self.files += merge_result(pickle.loads(pickle.dumps(work))(unit)).files

    def commit(self) -> bool:
        return self.table.commit(self.files, self._moves, schema=self._schema)


def run_step(folder: Path, log: Sequence[Change], end: int, schema: pa.Schema = SCHEMA) -> None:
    step = Step(folder, log, end, schema)
    step.stage()
    step.merge()
    assert step.commit()


def check(folder: Path, log: Sequence[Change]) -> None:
    best: dict[int, tuple[int, int, bool]] = {}
    for offset, (key, at, is_delete) in enumerate(log):
        best[key] = max(best.get(key, (-1, -1, False)), (at or 0, offset, is_delete))
    rows = deltalake.DeltaTable(str(folder)).to_pyarrow_table().to_pylist()
    rows_by_key = {int(row["key"]): (row["at"], row["offset"], row["name"]) for row in rows}
    assert len(rows_by_key) == len(rows)
    alive = {key: row for key, row in best.items() if not row[2]}
    assert rows_by_key == {key: (at, offset, f"{key}-{offset}") for key, (at, offset, _) in alive.items()}


def test_the_table_equals_the_model_with_interrupted_and_concurrent_steps(tmp_path: Path) -> None:
    folder = tmp_path / "customers"
    source = random.Random(11)
    log = [(source.randrange(300), source.randrange(500), source.random() < 0.2) for _ in range(1500)]
    reached = 0
    while reached < len(log):
        end = min(len(log), reached + source.randrange(1, 300))
        fate = source.choice(("done", "done", "staged", "merged", "raced"))
        step = Step(folder, log, end)
        step.stage()
        if fate in ("merged", "raced"):
            step.merge()
        if fate == "raced":
            # Another run does the same, or something else, before this one commits.
            other = source.choice((end, min(len(log), end + 50)))
            run_step(folder, log, other)
            with pytest.raises(StalePlan):
                step.commit()
            reached = other
        elif fate == "done":
            step.merge()
            assert step.commit()
            reached = end
        if reached:
            check(folder, log[:reached])
    table = KeyedTable(Storage.at(str(folder)), replaced_retention=timedelta(0))
    assert len(deltalake.DeltaTable(str(folder)).file_uris()) > 4, "buckets were split"
    assert table.vacuum() > 0
    check(folder, log)
    table.next_offsets([(TOPIC, 0)])
    assert {file.path for file in table.stored()} <= {f"buckets/{file.name}" for file in (folder / "buckets").iterdir()}
    remembered = {file.name for file in (folder / "_deleted").iterdir()}
    assert {file.path[8:] for file in table.stored() if file.path.endswith(".d.parquet")} <= remembered
    more = [*log, *((key, 400, False) for key in range(300))]
    run_step(folder, more, len(more))
    check(folder, more)


def test_a_table_that_begins_with_deletes_has_no_order_column_yet(tmp_path: Path) -> None:
    folder = tmp_path / "customers"
    log: list[Change] = [(1, None, True), (1, None, True), (1, 7, False), (2, 8, False), (2, None, True)]
    without_order = SCHEMA.remove(SCHEMA.get_field_index("at"))
    run_step(folder, log, 1, without_order)
    run_step(folder, log, 2, without_order)
    run_step(folder, log, 5)
    rows = deltalake.DeltaTable(str(folder)).to_pyarrow_table().to_pylist()
    assert [(row["key"], row["at"]) for row in rows] == [(b"1", 7)]


def test_tables_of_other_programs_are_refused(tmp_path: Path) -> None:
    assert land(open_table(str(tmp_path / "orders")), 0, 0, 5)
    every = KeyedTable(Storage.at(str(tmp_path / "orders")))
    every.next_offsets([(TOPIC, 0)])
    with pytest.raises(InvalidSetting, match="mode=append"):
        every.stored()
    run_step(tmp_path / "customers", [(1, 1, False)], 1)
    deltalake.write_deltalake(
        str(tmp_path / "customers"), deltalake.DeltaTable(str(tmp_path / "customers")).to_pyarrow_table(), mode="append"
    )
    with pytest.raises(CorruptState, match="which another program wrote"):
        run_step(tmp_path / "customers", [(1, 1, False), (2, 2, False)], 2)
