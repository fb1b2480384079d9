"""Work on the files of a table in Spark tasks: divided by size, in one job."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from typing import Final, Generic, TypeVar

import pyarrow as pa

from millstream.pipelines.jobs.land.sources import FILE_BYTES, TASK_BYTES_MIN
from millstream.pipelines.lake.rewriting import FileShare, FileWork

COLUMNS: Final = "path string, result string"
"""The columns of a task's results, in Spark's notation."""

_OPENING_BYTES: Final = 256 * 1024
"""The cost of opening a file, in bytes that could be read meanwhile."""


Share = TypeVar("Share", bound=FileShare)


class FileTasks(Generic[Share]):
    """The function of `mapInArrow` that maps task numbers to the results for their files."""

    def __init__(self, work: FileWork[Share], tasks: Sequence[Sequence[Share]]) -> None:
        self._work = work
        self._tasks = tasks

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                results = self._done(self._tasks[number])
                paths = [file.path for file in self._tasks[number]]
                yield pa.RecordBatch.from_pydict({"path": paths, "result": results})

    def _done(self, files: Sequence[Share]) -> list[str]:
        results: list[str] = []
        try:
            results.extend(self._work(file) for file in files)
            return results
        except BaseException:
            # The results of the other files are lost; their output would only fill the disk.
            self._work.discard(results)
            raise


def shares_of(files: Sequence[Share], *, parallelism: int) -> list[list[Share]]:
    """Divide files into as many tasks as run in parallel, or more if they would be too large."""
    total = sum(file.bytes + _OPENING_BYTES for file in files)
    if not total:
        return []
    count = min(len(files), ceil(total / min(FILE_BYTES, max(TASK_BYTES_MIN, total / parallelism))))
    tasks: list[list[Share]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for file in sorted(files, key=lambda file: (-file.bytes, file.path)):
        load, number = loads[0]
        tasks[number].append(file)
        heapq.heapreplace(loads, (load + file.bytes + _OPENING_BYTES, number))
    return tasks
