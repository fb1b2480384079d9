"""A task that cannot write leaves no file behind, which would keep the disk full."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millstream.pipelines.jobs.land import task
from millstream.pipelines.jobs.land.task import LandTasks, TopicWork
from millstream.pipelines.lake.columns import QUARANTINE, RAW
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.task_writer import TaskWriter
from millstream.pipelines.source.ranges import Range

WHOLE = 1_000_000


class FullFile:
    """A file on a disk with a limited number of free bytes."""

    closed = False

    def __init__(self, file: Any, room: int) -> None:
        self._file = file
        self._room = room

    def write(self, data: Any) -> int:
        size = len(memoryview(data))
        self._room -= size
        if self._room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._file.write(data)
        return size

    def tell(self) -> int:
        return int(self._file.tell())

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self.closed = True
        self._file.close()


class FullFiles:
    """The files of a folder on a full disk."""

    def __init__(self, files: Any, room: int) -> None:
        self._files = files
        self._room = room

    def open_output_stream(self, path: str) -> Any:
        return pa.PythonFile(FullFile(self._files.open_output_stream(path), self._room), mode="w")

    def delete_file(self, path: str) -> None:
        self._files.delete_file(path)


@dataclass(frozen=True)
class FullStorage(Storage):
    """A folder on a full disk."""

    room: int = WHOLE

    def files(self) -> Any:
        return FullFiles(super().files(), self.room)


def rows(count: int, value: bytes) -> pa.RecordBatch:
    columns = [pa.array([0] * count, pa.int32()), pa.array(range(count), pa.int64()), pa.array([value] * count)]
    return pa.RecordBatch.from_arrays(columns, names=["partition", "offset", "value"])


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("room", [0, 10, 500, 2000])
def test_the_files_of_a_failed_writer_are_deleted(tmp_path: Path, room: int) -> None:
    writer = TaskWriter(FullStorage(str(tmp_path), room=room), RAW, "topic")
    writer.write(rows(1000, b"value"))
    with pytest.raises(OSError, match="No space"):
        writer.close()
    writer.abort()
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(("room", "quarantine_room"), [(100, WHOLE), (WHOLE, 100), (WHOLE, 0), (WHOLE, WHOLE)])
def test_a_failed_task_deletes_the_files_of_all_its_topics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, quarantine_room: int
) -> None:
    def records(offset_range: Range, _options: object, _skip: object) -> Iterator[pa.RecordBatch]:
        yield rows(offset_range.end, b'{"id": 1}')
        refused = rows(offset_range.end, b"[]")
        missing = [pa.nulls(offset_range.end, QUARANTINE.field(name).type) for name in ("timestamp", "key", "headers")]
        yield pa.RecordBatch.from_arrays(
            [*refused.columns, *missing], names=[*refused.schema.names, "timestamp", "key", "headers"]
        )

    def work(topic: str, room: int, quarantine_room: int) -> TopicWork:
        folder = str(tmp_path / topic)
        return TopicWork(
            writer=TaskWriter(FullStorage(folder, room=room), RAW.append(pa.field("id", pa.int64())), topic),
            quarantine=TaskWriter(FullStorage(f"{folder}__quarantine", room=quarantine_room), QUARANTINE, topic),
            fields=pa.schema([pa.field("id", pa.int64())]),
            decodes=True,
        )

    monkeypatch.setattr(task, "read_records", records)
    works = {"a": work("a", WHOLE, WHOLE), "b": work("b", room, quarantine_room)}
    tasks = LandTasks("127.0.0.1:9092", [[Range("a", 0, 0, 5), Range("b", 0, 0, 5)]], works)
    numbers = [pa.RecordBatch.from_pydict({"id": [0]})]
    if room == quarantine_room:
        assert sum(batch.num_rows for batch in tasks(numbers)) == 2
        assert len(files_in(tmp_path)) == 4
        return
    with pytest.raises(OSError, match="No space"):
        list(tasks(numbers))
    assert files_in(tmp_path) == []
