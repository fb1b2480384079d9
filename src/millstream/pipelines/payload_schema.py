"""The fields that the payloads of a topic have: given with the pipeline, or found in a sample.

What was found is kept in the pipeline's folder, so that a pipeline has the same columns after each start. Where the
folder is lost, they are found anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from pyspark.sql.types import StructType

from millstream.pipelines.batch_loop import BatchLoop
from millstream.spark.options import BROKERS, read_options
from millstream.spark.ranges import Range, ranges_between
from millstream.spark.rows import read_range
from millstream.spark.shape import default_schema, shape_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SAMPLE_MAX: Final = 1000
"""How many messages of each partition are looked at, the youngest of it."""


def sample_ranges(loop: BatchLoop, topic: str, count: int = SAMPLE_MAX) -> list[Range]:
    """The last messages of every partition of a topic."""
    survey = loop.survey([topic])
    there = survey.partitions()
    first, last = survey.earliest(there), survey.latest(there)
    start = {
        name: {number: max(first[name][number], end - count) for number, end in ends.items()}
        for name, ends in last.items()
    }
    return ranges_between(start, last)


def find_schema(spark: SparkSession, loop: BatchLoop, topic: str, brokers: str) -> StructType | None:
    """The fields of the payloads in a sample; None if there is no message yet."""
    texts = list(_payloads(sample_ranges(loop, topic), brokers))
    if not texts:
        return None
    found = spark.read.json(spark.sparkContext.parallelize(texts, 1)).schema
    # What is no JSON at all would be a column of its own.
    return StructType([field for field in found.fields if field.name != "_corrupt_record"])


class KeptSchemas:
    """The schemas that were found, in a file."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "schemas.json"

    def read(self) -> dict[str, StructType]:
        """By topic; nothing if there is no file, or none that can be read."""
        try:
            document = json.loads(self._file.read_text(encoding="utf-8"))
            return {topic: StructType.fromJson(schema) for topic, schema in document.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def write(self, schemas: dict[str, StructType]) -> None:
        """Keep them; the file is there as a whole or not at all."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_name(f"schemas-{uuid4().hex}.tmp")
        new.write_text(json.dumps({topic: schema.jsonValue() for topic, schema in schemas.items()}), encoding="utf-8")
        os.replace(new, self._file)


def _payloads(ranges: list[Range], brokers: str) -> Iterator[str]:
    for one in ranges:
        options = read_options({BROKERS: brokers, "subscribe": one.topic, "columns": "value"})
        for batch in read_range(one, options, shape_of(default_schema(options), options)):
            for value in batch.column("value").to_pylist():
                if value is not None:
                    yield value.decode("utf-8", "replace")
