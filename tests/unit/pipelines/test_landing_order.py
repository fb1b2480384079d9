"""The columns that a task finds do not depend on the order in which it comes upon partitions."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pyarrow as pa

from millstream.pipelines.jobs.land.task import Work, _Landing
from millstream.pipelines.lake.columns import QUARANTINE, RAW
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.task_writer import TaskWriter

PAYLOADS = [
    {"id": 1, "buyer": {"name": "Bob", "age": 30}},
    {"id": 2, "buyer": {"name": 5, "age": 1.5}},
    {"id": 3, "tags": []},
]


def test_types_that_do_not_go_together_are_text_whichever_came_first(tmp_path: Path) -> None:
    storage = Storage.at(str(tmp_path))
    for order in itertools.permutations(PAYLOADS):
        writers = TaskWriter(storage, RAW, "topic"), TaskWriter(storage, QUARANTINE, "topic")
        landing = _Landing("orders", Work(writer=writers[0], quarantine=writers[1], decodes=True, evolves=True))
        for offset, payload in enumerate(order):
            columns = [
                pa.array([0], pa.int32()),
                pa.array([offset], pa.int64()),
                pa.array([json.dumps(payload).encode()], pa.binary()),
            ]
            landing.take(pa.RecordBatch.from_arrays(columns, names=["partition", "offset", "value"]))
        fields = landing.report().fields
        assert fields is not None
        assert {field.name: field.type for field in fields} == {
            "id": pa.int64(),
            "buyer": pa.struct([("name", pa.string()), ("age", pa.float64())]),
        }
