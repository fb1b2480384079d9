"""Inferred columns depend only on the order of messages, not on their division into batches."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from millstream.pipelines.jobs.land.inference import Evolution
from millstream.pipelines.jobs.land.task import Landing, TopicWork
from millstream.pipelines.lake.columns import QUARANTINE, RAW
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.task_writer import TaskWriter
from millstream.protocol.records.decoder import UnreadableBatch

PAYLOADS: list[dict[str, Any]] = [
    {"id": 1, "buyer": {"name": "Bob", "age": 30}},
    {"id": 2, "buyer": {"name": 5, "age": 1.5}},
    {"id": 3, "tags": []},
]


def test_the_first_value_of_a_field_decides_its_type(tmp_path: Path) -> None:
    storage = Storage.at(str(tmp_path))
    for order in itertools.permutations(PAYLOADS):
        first = next(payload["buyer"]["name"] for payload in order if "buyer" in payload)
        kinds = (pa.string(), pa.int64()) if first == "Bob" else (pa.int64(), pa.float64())
        for size in (1, 2, 3):
            writers = TaskWriter(storage, RAW, "topic"), TaskWriter(storage, QUARANTINE, "topic")
            landing = Landing("orders", TopicWork(writer=writers[0], quarantine=writers[1], decodes=True, evolves=True))
            for start in range(0, len(order), size):
                texts = [json.dumps(payload).encode() for payload in order[start : start + size]]
                columns = [
                    pa.array([0] * len(texts), pa.int32()),
                    pa.array(range(start, start + len(texts)), pa.int64()),
                    pa.array(texts, pa.binary()),
                ]
                landing.take(pa.RecordBatch.from_arrays(columns, names=["partition", "offset", "value"]))
            evolution = Evolution(pa.schema([]), landing.report().new_fields)
            assert {field.name: field.type for field in evolution.fields} == {
                "id": pa.int64(),
                "buyer": pa.struct([("name", kinds[0]), ("age", kinds[1])]),
            }


def test_a_batch_that_is_quarantined_already_is_not_quarantined_again(tmp_path: Path) -> None:
    storage = Storage.at(str(tmp_path))
    writers = TaskWriter(storage, RAW, "topic"), TaskWriter(storage, QUARANTINE, "topic")
    left_out = {0: pa.array([7], pa.int64())}
    landing = Landing("orders", TopicWork(writer=writers[0], quarantine=writers[1], left_out=left_out))
    for partition, start in ((0, 7), (0, 9), (1, 7)):
        landing.quarantine(partition, UnreadableBatch(start, start + 2, 0, "torn"))
    assert sum(file.rows for file in landing.report().quarantined) == 2
