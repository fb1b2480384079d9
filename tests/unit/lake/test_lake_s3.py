"""Tables in an object store: the same guarantees, by conditional puts."""

from __future__ import annotations

import os
import threading
import uuid

import deltalake
import pyarrow as pa
import pytest

from millstream.core.errors import InvalidSetting
from millstream.pipelines.jobs.land.abandoned_files import AbandonedFiles
from millstream.pipelines.lake.columns import RAW
from millstream.pipelines.lake.parquet_table import ParquetTable
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import LakeTable, open_table
from millstream_testing.lake_rows import (
    TOPIC,
    delta_rows,
    files_rows,
    in_this_process,
    land,
    next_offset,
    once,
    rows,
    write,
    write_quarantine,
)


@pytest.fixture
def place(s3: str) -> Storage:
    return Storage.at(f"{s3}/{uuid.uuid4().hex}/orders")


def test_of_several_runs_that_land_the_same_range_one_wins(place: Storage) -> None:
    done: list[bool] = []
    barrier = threading.Barrier(3)

    def run() -> None:
        table = LakeTable(place)
        files = write(table, [rows(0, range(10))])
        barrier.wait()
        done.append(table.commit(files, {(TOPIC, 0): (0, 10)}, schema=RAW))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [False, False, True]
    assert delta_rows(place) == once(0, range(10))
    assert [len(batch) for batch in LakeTable(place).scan(TOPIC, 0, 2, 5)] == [3]


def test_parquet_files_are_copied_into_place(place: Storage) -> None:
    table = ParquetTable(place)
    bad = write_quarantine(table, 0, [10])
    files = write(table, [rows(0, range(10))])
    write(table, [rows(0, range(10))])
    assert files_rows(place) == once(0, [])
    assert table.commit(files, {(TOPIC, 0): (0, 11)}, schema=RAW, quarantined=bad)
    assert files_rows(place) == once(0, range(10))
    assert files_rows(place.suffixed("__quarantine")) == once(0, [10])
    # A file that another run has moved meanwhile is not an error.
    place.publish(files[0].path, files[0].path)
    assert next_offset(ParquetTable(place)) == 11
    assert files_rows(place) == once(0, range(10))


@pytest.mark.parametrize("format", ["delta", "parquet"])
def test_columns_are_widened_and_files_of_failed_attempts_deleted(place: Storage, format: str) -> None:
    narrow, wide = (RAW.append(pa.field("total", kind)) for kind in (pa.int64(), pa.float64()))
    table = open_table(place.url, format=format)
    files = write(table, [rows(0, range(3), narrow, total=[1, 2, 3])], narrow)
    assert table.commit(files, {(TOPIC, 0): (0, 3)}, schema=narrow)
    assert table.widen([("total",)], run=in_this_process, bytes_max=2**60) == {}
    files = write(table, [rows(0, [3], wide, total=[0.5])], wide)
    assert table.commit(files, {(TOPIC, 0): (3, 4)}, schema=wide)
    totals = [row["total"] for batch in table.scan(TOPIC, 0, 0, 4) for row in batch.to_pylist()]
    assert totals == [1.0, 2.0, 3.0, 0.5]
    count = delta_rows if format == "delta" else files_rows
    assert count(place) == once(0, range(4))
    attempt = "0123456789abcdef"
    writer = table.writer(wide, TOPIC, attempt=attempt)
    writer.write(rows(0, [4], wide, total=[1.5]))
    (file,) = writer.close()
    with pytest.raises(ValueError, match="failed"), AbandonedFiles().watch(attempt, [(writer.storage, writer.folder)]):
        raise ValueError("failed")
    assert file.path not in set(writer.storage.data_files())
    assert count(place) == once(0, range(4))


def test_options_name_the_store(place: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"AWS_ENDPOINT_URL": "", "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_REGION": ""}
    with monkeypatch.context() as patched:
        for name in options:
            options[name] = os.environ[name]
            patched.delenv(name)
        table = open_table(place.url, options=options)
        assert land(table, 0, 0, 3)
        stored_rows = deltalake.DeltaTable(
            place.url, storage_options={**options, "allow_http": "true"}
        ).to_pyarrow_table()
        assert len(stored_rows) == 3


@pytest.mark.parametrize("url", ["hdfs://somewhere/lake", "s3://", "http://somewhere/lake"])
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidSetting):
        open_table(url)


def test_plain_files_have_a_folder_beside_them() -> None:
    with pytest.raises(InvalidSetting, match="is a root"):
        open_table("s3://lake", format="parquet")
    with pytest.raises(InvalidSetting, match="delta or parquet"):
        open_table("/tmp/lake", format="orc")
