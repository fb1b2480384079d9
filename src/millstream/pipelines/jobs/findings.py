"""What tasks find in payloads, told to the driver beside the rows: how many could not be read, and fields that are new.

Spark adds up what the tasks of a job have told before the job is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
from pyspark.accumulators import Accumulator, AccumulatorParam

from millstream.pipelines.jobs.land.inference import joined_schemas

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Finding(NamedTuple):
    """What was found in payloads of one topic."""

    undecoded: int = 0
    """Messages whose payload is no JSON object, or has a value that does not fit."""
    fields: pa.Schema | None = None
    """All fields, if there are others than those that are known."""


Findings = dict[str, Finding]


class _Together(AccumulatorParam[Findings]):
    def zero(self, value: Findings) -> Findings:
        return {}

    def addInPlace(self, value1: Findings, value2: Findings) -> Findings:  # noqa: N802
        merged = dict(value1)
        for topic, found in value2.items():
            have = merged.get(topic, Finding())
            fields = [one.fields for one in (have, found) if one.fields is not None]
            merged[topic] = Finding(have.undecoded + found.undecoded, joined_schemas(fields) if fields else None)
        return merged


class FindingsAccumulator:
    """Where tasks write down what they find; it goes to them, and the driver reads it."""

    def __init__(self, spark: SparkSession) -> None:
        self._noted: Accumulator[Findings] = spark.sparkContext.accumulator({}, _Together())

    def note(self, topic: str, finding: Finding) -> None:
        """Write something down, in a task."""
        self._noted.add({topic: finding})

    def read(self) -> Mapping[str, Finding]:
        """Everything since the last `clear`."""
        return self._noted.value

    def clear(self) -> None:
        """Begin anew, while no task runs."""
        self._noted.value = {}
