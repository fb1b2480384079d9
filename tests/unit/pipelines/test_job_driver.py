"""The driver of a job: its memory, and what its streaming queries have read, by Spark's progress."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from millstream.pipelines.runtime.job_driver import QueryProgress
from millstream.pipelines.runtime.jobs_child import clean_environment


def batch(second: int, rows: int, *sources: dict[str, Any]) -> dict[str, Any]:
    return {
        "timestamp": f"2026-01-31T12:00:{second:02}.000Z",
        "batchId": second,
        "numInputRows": rows,
        "sources": sources,
    }


def source(end: dict[str, Any] | None, latest: dict[str, Any] | None) -> dict[str, Any]:
    return {"endOffset": json.dumps(end), "latestOffset": None if latest is None else json.dumps(latest)}


def test_every_batch_is_counted_once_and_the_last_one_has_the_lag() -> None:
    progress = QueryProgress()
    assert progress.take([]) is None
    first, second = batch(1, 10, source({"a": {"0": 10}}, {"a": {"0": 25}})), batch(2, 5)
    assert progress.take([first]) == first
    assert (progress.rows, progress.lag) == (10, 15)
    third = batch(3, 7, source({"a": {"0": 22}}, {"a": {"0": 25, "1": 4}}), source({"b": {"0": 1}}, {"b": {"0": 1}}))
    assert progress.take([first, second, third]) == third
    assert (progress.rows, progress.lag) == (22, 7)


def test_the_lag_of_a_source_without_offsets_is_unknown() -> None:
    progress = QueryProgress()
    for second, other in enumerate(
        [source({"a": {"0": 1}}, None), source(None, {"a": {"0": 1}}), {}, source({}, {"x": 2})]
    ):
        progress.take([batch(second, 1, other)])
        assert progress.lag is None
    assert progress.rows == 4


def test_the_memory_of_a_job_is_bounded_but_not_what_allocators_reserve() -> None:
    program = """
from millstream.pipelines.runtime.job_driver import limit_python
limit_python(1200 << 20)
import pyarrow
values = pyarrow.array(range(100_000))
used = bytearray(512 << 20)
try:
    bytearray(1024 << 20)
except MemoryError:
    print("refused")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], env=clean_environment(), capture_output=True, check=False, text=True
    )
    assert (ended.stdout, ended.stderr) == ("refused\n", "")
