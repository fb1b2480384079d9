"""Work on the files of a table in tasks: each file once, tasks of bounded size, and failed tasks leave nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.pipelines.jobs.land.file_tasks import FileTasks, shares_of
from millstream.pipelines.jobs.land.sources import FILE_BYTES
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table_file import ActiveFile
from millstream_testing.lake_rows import LANDED


def file(name: str, size: int = 1) -> ActiveFile:
    return ActiveFile(path=name, bytes=size, partitions=None, offsets=None, values=(), added=LANDED)


@given(st.lists(st.integers(1, 2 * FILE_BYTES), max_size=50), st.integers(1, 16))
def test_every_file_is_in_one_task(sizes: list[int], parallelism: int) -> None:
    files = [file(f"{number}", size) for number, size in enumerate(sizes)]
    shares = shares_of(files, parallelism=parallelism)
    flat = [file for share in shares for file in share]
    assert sorted(file.path for file in flat) == sorted(file.path for file in files)
    assert all(shares)
    for share in shares:
        assert sum(file.bytes for file in share) <= 2 * FILE_BYTES or len(share) == 1


def test_many_small_files_share_tasks() -> None:
    assert [len(share) for share in shares_of([file(f"{number}") for number in range(100)], parallelism=4)] == [25] * 4


class Counted:
    """Work that fails for one file, and records what was discarded."""

    attempt = ""

    def __init__(self) -> None:
        self.discarded: list[str] = []

    @property
    def output_folders(self) -> list[tuple[Storage, str]]:
        return []

    def __call__(self, file: ActiveFile) -> str:
        if file.path == "bad":
            raise OSError("full")
        return json.dumps(file.path)

    def discard(self, results: Iterable[str]) -> None:
        self.discarded.extend(results)


def test_a_failed_task_discards_its_output() -> None:
    numbers = [pa.RecordBatch.from_pydict({"id": [0]})]
    work = Counted()
    (reported,) = FileTasks(work, [[file("a"), file("b")]])(numbers)
    assert reported.to_pydict() == {"path": ["a", "b"], "result": ['"a"', '"b"']}
    assert work.discarded == []
    with pytest.raises(OSError, match="full"):
        list(FileTasks(work, [[file("a"), file("bad"), file("b")]])(numbers))
    assert work.discarded == ['"a"']
