"""A planned statement that Java evaluates on a few rows in the driver: no Spark job, no task, no Python worker.

A job costs tens of milliseconds of CPU even for a single row, mostly for scheduling and for two Python workers. With
many pipelines on a topic, each message would cost that once per pipeline.

This calls internal methods of Spark. If one of them is missing or fails, the caller runs a job instead, which gives the
same rows or Spark's own error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from millstream.pipelines.jobs.transform.statement import elements

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

BYTES_MAX: Final = 1024 * 1024
"""The maximum bytes of the input rows, and of the output rows; larger batches run as a job."""

_OUT_ROWS: Final = 1000
"""How many rows Java passes at a time."""

_SCAN: Final = "Scan ExistingRDD"
"""The operator that only the view has."""

_OPERATORS: Final = frozenset({"Project", "Filter", "Generate", "InputAdapter", _SCAN})
"""Operators that need nothing of a task: no memory to account for, no exchange, no Python."""

_STAGE: Final = "WholeStageCodegen"

_ZONE: Final = "UTC"


class LocalPlan:
    """The plan of a statement over one view, whose rows are given for each evaluation.

    The view is an RDD without rows, and Spark's plan is a function of a partition of that RDD; every evaluation passes
    another partition.
    """

    def __init__(self, spark: SparkSession, columns: StructType) -> None:
        """Make a view of these columns; `plan` follows, once a statement uses it."""
        from pyspark.sql import DataFrame

        session: Any = spark._jsparkSession
        jvm: Any = spark.sparkContext._jvm
        # py4j looks up each part of a Java name on every use, so all names are resolved once, here.
        self._arrow = _module(jvm.org.apache.spark.sql.execution.arrow, "ArrowConverters")
        self._contexts = _module(jvm.org.apache.spark, "TaskContext")
        self._iterators = _module(jvm.scala.collection, "Iterator")
        self._lists = _module(jvm.scala.collection.immutable, "LazyList")
        self._part_of = jvm.org.apache.spark.rdd.ParallelCollectionPartition
        self._nothing = jvm.scala.Option.empty()
        empty: Any = spark.sparkContext._jsc.parallelize(jvm.java.util.ArrayList(), 1)
        self._tag = empty.classTag()
        self._types_in = jvm.org.apache.spark.sql.types.DataType.fromJson(columns.json())
        self._arrow_in = to_arrow_schema(columns, timezone=_ZONE)
        self.view = DataFrame(session.internalCreateDataFrame(empty.rdd(), self._types_in, False), spark)
        # Expressions use the active session of this thread while they run.
        jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(session)
        self._rows: Any = None
        self._types_out: Any = None
        self._arrow_out = pa.schema([])

    def plan(self, frame: DataFrame) -> bool:
        """Plan a statement over the view; return whether it can be evaluated here."""
        execution: Any = frame._jdf.queryExecution()
        scans = 0
        for name in _operators(execution.executedPlan()):
            if name not in _OPERATORS and not name.startswith(_STAGE):
                return False
            scans += name == _SCAN
        if scans != 1:
            return False
        self._rows = execution.toRdd()
        self._types_out = execution.analyzed().schema()
        self._arrow_out = to_arrow_schema(frame.schema, timezone=_ZONE)
        return True

    def evaluate(self, batches: Iterable[pa.RecordBatch]) -> list[pa.RecordBatch] | None:
        """Return the statement's output for the given rows; None if input or output is larger than `BYTES_MAX`.

        Java's errors are raised: those of the statement, such as a division by zero, as well as others.
        """
        bounded = _bounded(batches)
        if bounded is None:
            return None
        table = pa.Table.from_batches(bounded, self._arrow_in).combine_chunks()
        return _bounded(made for batch in table.to_batches() for made in self._evaluated(batch))

    def _evaluated(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        context = self._contexts.empty()
        try:
            message = self._iterators.single(batch.serialize().to_pybytes())
            rows = self._arrow.fromBatchIterator(message, self._types_in, _ZONE, True, False, context)
            # The iterator reuses one row object. Each row is read before the next is requested, so a lazy list is safe.
            part = self._part_of(0, 0, getattr(self._lists, "from")(rows), self._tag)
            made = self._rows.iterator(part, context)
            encoded = self._arrow.toBatchIterator(made, self._types_out, _OUT_ROWS, _ZONE, True, False, context)
            while encoded.hasNext():
                yield pa.ipc.read_record_batch(pa.py_buffer(encoded.next()), self._arrow_out)
        finally:
            # This releases the memory that Arrow has allocated.
            context.markTaskCompleted(self._nothing)


def _module(package: Any, name: str) -> Any:
    return getattr(getattr(package, f"{name}$"), "MODULE$")


def _bounded(batches: Iterable[pa.RecordBatch]) -> list[pa.RecordBatch] | None:
    """Return all batches, or None as soon as they are too large."""
    kept_batches: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        size += batch.nbytes
        if size > BYTES_MAX:
            return None
        kept_batches.append(batch)
    return kept_batches


def _operators(plan: Any) -> Iterator[str]:
    yield plan.nodeName()
    for child in elements(plan.children()):
        yield from _operators(child)
