"""A prepared statement: its topics as views, its lake tables, its functions, and the analysis of Spark's plan."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from importlib import import_module
from math import ceil
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.dataset as pads
from deltalake import DeltaTable
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from millstream.core.errors import InvalidSetting, MillstreamError
from millstream.core.pipeline import (
    BY_SCHEMA,
    FUNCTIONS_CODE,
    NO_DECODING,
    Pipeline,
    PipelineKind,
    TransformSettings,
    named_texts,
)
from millstream.core.setting import suggestion
from millstream.core.sql import FORBIDDEN
from millstream.pipelines.jobs.batch_loop import PART_SCHEMA, BatchLoop, Plan, as_row, batch_of_job
from millstream.pipelines.jobs.job import JobContext
from millstream.pipelines.jobs.own_job import load_module
from millstream.pipelines.jobs.transform.local_plan import LocalPlan
from millstream.pipelines.jobs.transform.payload_schema import (
    PayloadSchemas,
    StoredSchemas,
    find_fields,
    parse_schemas,
    registered_fields,
    to_arrow,
)
from millstream.pipelines.jobs.transform.statement import Statement, elements, explain_errors, read_statement
from millstream.pipelines.jobs.transform.topic_view import FindingsAccumulator, TopicView, rows_of_view, view_of
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.runtime.fault import MarkedTask, marked_function
from millstream.pipelines.runtime.spark_session import SUBSTITUTION
from millstream.pipelines.source.batch_commit import Batch
from millstream.pipelines.source.options import WriteOptions
from millstream.pipelines.source.row_producer import write_part
from millstream.pipelines.source.writer import check_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_logger = logging.getLogger(__name__)

HANDED_BYTES_MAX: Final = 64 * 1024 * 1024
"""Up to this size, table rows go through the driver, which is faster than starting tasks."""
_TASK_BYTES: Final = 128 * 1024 * 1024
_AS_THEY_ARE = ("binary", "string", "void")


class TableTasks:
    """The function of `mapInArrow` that maps task numbers to the rows of their files."""

    def __init__(self, storage: Storage, version: int, types: pa.Schema, tasks: Sequence[frozenset[str]]) -> None:
        self._storage = storage
        self._version = version
        self._types = types
        self._tasks = tasks

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        whole = self._storage.table(self._version).to_pyarrow_dataset()
        for batch in batches:
            for number in batch.column(0).to_pylist():
                mine = [fragment for fragment in whole.get_fragments() if fragment.path in self._tasks[number]]
                rows = pads.FileSystemDataset(mine, whole.schema, whole.format, whole.filesystem)
                yield from (part.cast(self._types) for part in rows.to_batches())


def rows_of(spark: SparkSession, storage: Storage, table: DeltaTable) -> tuple[DataFrame, int]:
    """Return the rows of a table at the version of its handle, and their approximate size."""
    from pyspark.sql.pandas.types import from_arrow_schema

    size = sum(pa.table(table.get_add_actions(flatten=True)).column("size_bytes").to_pylist())
    if size <= HANDED_BYTES_MAX:
        rows = table.to_pyarrow_table()
        schema = from_arrow_schema(rows.schema)
        # A table without files has columns without chunks, which Spark refuses.
        frame = spark.createDataFrame(rows) if rows.num_rows else spark.createDataFrame([], schema)
        return frame, rows.nbytes
    dataset = table.to_pyarrow_dataset()
    paths = [fragment.path for fragment in dataset.get_fragments()]
    count = min(len(paths), max(spark.sparkContext.defaultParallelism, ceil(size / _TASK_BYTES)))
    schema = from_arrow_schema(dataset.schema)
    types = to_arrow_schema(schema, timezone="UTC")
    reading = TableTasks(storage, table.version(), types, [frozenset(paths[first::count]) for first in range(count)])
    return _without_lineage(spark.range(0, count, 1, count).mapInArrow(MarkedTask(reading), schema)), size


def _without_lineage(frame: DataFrame) -> DataFrame:
    """Hide how a frame is made, since views of topics are recognized by their plan."""
    from pyspark.sql import DataFrame

    spark: Any = frame.sparkSession
    execution: Any = frame._jdf.queryExecution()
    rows = spark._jsparkSession.internalCreateDataFrame(execution.toRdd(), execution.analyzed().schema(), False)
    return DataFrame(rows, spark)


CHECK_INTERVAL_S: Final = 5.0
"""How often to look for a new version."""

_TABLE_MISSING: Final = ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA")
"""Spark's error classes for a missing or empty folder."""

BROUGHT_BYTES_MAX: Final = 64 * 1024 * 1024
"""A table up to this size is broadcast, which keeps messages in order; a larger one is shuffled."""


class LakeView:
    """A lake table as a view of a session."""

    def __init__(self, spark: SparkSession, name: str, url: str) -> None:
        self._spark = spark
        self._name = name
        self._url = url
        self._storage: Storage | None = None
        self._table: DeltaTable | None = None
        self._version: int | None = None
        self._looked = 0.0
        self._size_bytes = 0
        self._frame: DataFrame | None = None

    def refresh(self) -> None:
        """Refresh the view, so that it shows the table as it was at most a few seconds ago."""
        now = time.monotonic()
        if self._frame is not None and now - self._looked < CHECK_INTERVAL_S:
            return
        self._looked = now
        frame = self._delta() if self._is_delta() else self._parquet()
        if frame is not None:
            self.close()
            self._frame = frame
            shown = frame.hint("broadcast") if self._size_bytes <= BROUGHT_BYTES_MAX else frame
            shown.createOrReplaceTempView(f"`{self._name}`")

    def has_changed(self) -> bool:
        if self._is_delta():
            return self._newest().version() != self._version
        return self._frame is None or sorted(self._parquet().inputFiles()) != sorted(self._frame.inputFiles())

    @property
    def content_version(self) -> object:
        """Return a value that changes with the rows that the view shows."""
        return self._frame

    def close(self) -> None:
        if self._frame is not None:
            self._frame.unpersist()
            self._frame = None

    def _is_delta(self) -> bool:
        if self._table is not None:
            return True
        storage = self._reached()
        return DeltaTable.is_deltatable(storage.url, dict(storage.options))

    def _reached(self) -> Storage:
        if self._storage is None:
            self._storage = Storage.reached_from_here(self._url)
        return self._storage

    def _delta(self) -> DataFrame | None:
        table = self._newest()
        if table.version() == self._version and self._frame is not None:
            return None
        self._version = table.version()
        # Spark caches it, in memory or on disk, so each version is read once.
        frame, self._size_bytes = rows_of(self._spark, self._reached(), table)
        return frame.persist()

    def _newest(self) -> DeltaTable:
        if self._table is None:
            self._table = self._reached().table()
        else:
            self._table.update_incremental()
        return self._table

    def _parquet(self) -> DataFrame:
        from pyspark.errors import AnalysisException

        if self._reached().folder is None:
            # Spark itself has no reader for object stores.
            raise self._missing("no Delta table")
        try:
            # Files written later may have more columns.
            frame = self._spark.read.option("mergeSchema", "true").parquet(self._url)
        except AnalysisException as error:
            if error.getCondition() in _TABLE_MISSING:
                # It may not have been landed yet; wait for it as for a topic.
                raise self._missing("neither a Delta table nor Parquet files") from None
            reason = str(error).partition("\n")[0]
            raise InvalidSetting(f"the table {self._name!r} cannot be read at {self._url}: {reason}") from None
        execution: Any = frame._jdf.queryExecution()
        # A Python or a Scala number, depending on py4j's version.
        self._size_bytes = int(str(execution.optimizedPlan().stats().sizeInBytes()))
        return frame

    def _missing(self, what: str) -> FileNotFoundError:
        return FileNotFoundError(f"table {self._name!r} does not exist at {self._url} yet: {what}")


_REMEMBERS: Final = frozenset(
    {
        "Aggregate",
        "Deduplicate",
        "DeduplicateWithinWatermark",
        "Distinct",
        "Except",
        "GlobalLimit",
        "Intersect",
        "LocalLimit",
        "Offset",
        "Sample",
        "Sort",
        "Tail",
        "Window",
    }
)
"""Operators that mean something else for one batch than for all messages."""

_AGGREGATE: Final = "Aggregate"

_DISTINCT: Final = "Distinct"

_SETS: Final = frozenset({"Except", "Intersect"})

_OF_TOPIC: Final = "MapInArrow"
"""The operator that only views of topics have."""

_ATTRIBUTE: Final = "AttributeReference"

_WITH: Final = "WithCTE"

_INLINE: Final = "org.apache.spark.sql.catalyst.optimizer.InlineCTE"

_PARTS: Final = frozenset({"GetStructField", "GetArrayStructFields"})
"""Operators that extract one field."""


class QueryPlan:
    def __init__(self, frame: DataFrame) -> None:
        self._frame = frame
        self._jvm: Any = frame.sparkSession.sparkContext._jvm
        self._plan: Any = self._inlined(frame._jdf.queryExecution().analyzed())

    @cached_property
    def _nodes(self) -> list[tuple[Any, bool]]:
        return list(_nodes(self._plan))

    @property
    def reads_topics(self) -> bool:
        """Whether its rows are made of messages."""
        return any(of_topic for _, of_topic in self._nodes)

    @property
    def needs_earlier_messages(self) -> bool:
        return any(
            of_topic and (node.nodeName() in _REMEMBERS or _joins_topics(node)) for node, of_topic in self._nodes
        )

    @property
    def is_repeatable(self) -> bool:
        """Whether nothing in it is decided when it is planned: times, random numbers and subqueries."""
        patterns = self._jvm.org.apache.spark.sql.catalyst.trees.TreePattern
        decided = (patterns.CURRENT_LIKE(), patterns.PLAN_EXPRESSION())
        return self._plan.deterministic() and not any(map(self._plan.containsPattern, decided))

    @property
    def aggregates(self) -> bool:
        """Whether rows may change as messages arrive, unless a watermark makes them final."""
        return any(of_topic and node.nodeName() == _AGGREGATE for node, of_topic in self._nodes)

    def rows(self) -> DataFrame:
        """Return the statement's rows, with DISTINCT over all messages that ever arrived.

        Spark treats it as an aggregate, whose rows would be repeated whenever a message repeats them.
        """
        if self._plan.nodeName() != _DISTINCT:
            return self._frame
        from pyspark.sql import DataFrame

        spark: Any = self._frame.sparkSession
        child = self._plan.children().apply(0)
        datasets = self._jvm.org.apache.spark.sql.classic.Dataset
        return DataFrame(datasets.ofRows(spark._jsparkSession, child), spark).dropDuplicates()

    def check_sets(self) -> None:
        """Raise `InvalidSetting` for operators that Spark turns into aggregates without final rows."""
        kinds = {node.nodeName() for node, of_topic in self._nodes if of_topic}
        if _DISTINCT in kinds:
            raise InvalidSetting("DISTINCT, or UNION without ALL, must be the outermost SELECT of the statement")
        if kinds & _SETS:
            raise InvalidSetting("EXCEPT and INTERSECT are not supported for topics; use NOT IN or IN, or a join")

    @cached_property
    def used(self) -> frozenset[str]:
        """Return the topic columns that it names, even those without effect."""
        names: dict[int, str] = {element.exprId().id(): element.name() for element in elements(self._plan.output())}
        for node, _ in self._nodes:
            if node.nodeName() != _OF_TOPIC:
                names |= {element.exprId().id(): element.name() for element in elements(node.references().toSeq())}
        return frozenset(name for number, name in names.items() if number in self._columns)

    @cached_property
    def whole_columns(self) -> frozenset[str]:
        return frozenset(
            column_reference.name()
            for node, _ in self._nodes
            if node.nodeName() != _OF_TOPIC
            for expression in elements(node.expressions())
            for column_reference in _whole_column_references(expression)
            if column_reference.exprId().id() in self._columns
        )

    def check_stream(self, output_mode: str) -> None:
        """Have Spark refuse operations that a stream does not support; the frame has to be a stream."""
        modes = self._jvm.org.apache.spark.sql.streaming.OutputMode
        mode = modes.Update() if output_mode == "update" else modes.Append()
        checker = self._jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
        checker.checkForStreaming(self._plan, mode)

    def _inlined(self, plan: Any) -> Any:
        """Inline the queries of WITH, which shows through which operators messages pass."""
        if plan.nodeName() != _WITH:
            return plan
        loader = self._jvm.java.lang.Thread.currentThread().getContextClassLoader()
        made = self._jvm.java.lang.Class.forName(_INLINE, True, loader).getConstructors()[0]
        # The further parameters differ between Spark versions and are not needed.
        others = [False] * (made.getParameterCount() - 1)
        return self._jvm.org.apache.spark.sql.catalyst.optimizer.InlineCTE(True, *others).apply(plan)

    @cached_property
    def _columns(self) -> frozenset[int]:
        """Return the topic columns by Spark's expression ids."""
        return frozenset(
            element.exprId().id()
            for node, _ in self._nodes
            if node.nodeName() == _OF_TOPIC
            for element in elements(node.output())
        )


def _whole_column_references(expression: Any) -> Iterator[Any]:
    kind = expression.nodeName()
    if kind == _ATTRIBUTE:
        yield expression
    for child in elements(expression.children()):
        if not (kind in _PARTS and child.nodeName() == _ATTRIBUTE):
            yield from _whole_column_references(child)


def _joins_topics(node: Any) -> bool:
    return node.nodeName() == "Join" and all(map(_is_of_topic, elements(node.children())))


def _nodes(plan: Any) -> Iterator[tuple[Any, bool]]:
    """Yield every node of a plan, and whether messages pass through it."""
    yield plan, _is_of_topic(plan)
    for child in elements(plan.children()):
        yield from _nodes(child)


def _is_of_topic(plan: Any) -> bool:
    return plan.nodeName() == _OF_TOPIC or any(_is_of_topic(child) for child in elements(plan.children()))


def can_rerun(frame: DataFrame) -> bool:
    """Whether a plan that is run again reads all messages again: Spark keeps what was exchanged between tasks."""
    execution: Any = frame._jdf.queryExecution()
    return not any(
        node.nodeName() in _EXCHANGES or (node.nodeName() == _BROADCAST and of_topic)
        for node, of_topic in _nodes(execution.executedPlan())
    )


_EXCHANGES: Final = frozenset({"Exchange", "ReusedExchange"})
_BROADCAST: Final = "BroadcastExchange"

_SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",
    # Batches are small and frequent: adaptive execution would cost more than it gains.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    # Lake tables decide themselves whether they are broadcast, which keeps messages in order; topics never are.
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    # Otherwise a table named text.`/etc/passwd` would be that file.
    "spark.sql.runSQLOnFiles": "false",
    # Otherwise '${env:NAME}' would be a variable of the node's environment.
    SUBSTITUTION: "false",
}

_WHOLE: Final = ("key", "value", "headers", "timestamp")
"""The columns that are written when all columns of a topic are selected; the key selects a new partition."""

_SCHEMAS: Final = "schemas.json"

APPEND: Final = "append"

UPDATE: Final = "update"


@dataclass(slots=True)
class PreparedQuery:
    """A statement in a session that has all of its views."""

    spark: SparkSession
    loop: BatchLoop
    statement: Statement
    options: WriteOptions
    folder: Path
    """The folder of the pipeline's state."""
    stream_folder: Path
    """The folder of the statement's stream state, if it has any."""
    watermarks: Mapping[str, tuple[str, str]]
    schemas: PayloadSchemas
    accumulator: FindingsAccumulator
    tables: tuple[LakeView, ...] = ()
    whole: Mapping[str, TopicView] = field(default_factory=dict)
    """The views with all columns."""
    views: Mapping[str, TopicView] = field(default_factory=dict)
    """The views with the columns that the statement uses."""
    needs_state: bool = False
    is_repeatable: bool = False
    """Whether running the statement's plan again gives what planning it again would."""
    output_mode: str = APPEND
    _kept: tuple[Any, DataFrame | None] = field(default=(None, None), init=False)
    """The planned job for small batches, and the state it depends on."""
    _local: tuple[Any, LocalPlan | None] = field(default=(None, None), init=False)
    """The local plan for the smallest batches, and the state it depends on."""

    def rows_here(self, plan: Plan) -> list[pa.RecordBatch] | None:
        """Return the statement's output for a batch, evaluated in this process; None if it needs a job.

        Statements with lake tables, or over several topics, always need one.
        """
        if not self.is_repeatable or self.tables or len(self.views) != 1:
            return None
        ((topic, view),) = self.views.items()
        options = self.loop.options
        try:
            if self._local[0] != view:
                self._local = view, self._planned_here(topic, view)
            local = self._local[1]
            return (
                None if local is None else local.evaluate(rows_of_view(view, plan.of(topic), options, self.accumulator))
            )
        except MillstreamError:
            raise
        except Exception as error:
            # A job gives the same rows, or an error that says where it happened.
            _logger.debug("a statement is not evaluated in the driver", extra={"reason": str(error)})
            self._local = view, None
            return None

    def try_rows(self, columns: Mapping[str, Sequence[Any]]) -> list[pa.RecordBatch] | None:
        """Return the statement's output for the given rows; None if it cannot be evaluated in this process."""
        ((topic, view),) = self.views.items()
        local = self._planned_here(topic, view)
        types = to_arrow_schema(view.schema, timezone="UTC")
        return None if local is None else local.evaluate([pa.RecordBatch.from_pydict(dict(columns), types)])

    def _planned_here(self, topic: str, view: TopicView) -> LocalPlan | None:
        local = LocalPlan(self.spark, view.schema)
        local.view.createOrReplaceTempView(f"`{topic}`")
        return local if local.plan(as_messages(self.frame(), self.options)) else None

    def result_of_job(self, query: str) -> DataFrame | None:
        """Return a job that writes the statement's rows for the batch that it passes to its tasks.

        It is planned once for many batches, since planning takes longer than a small batch. None if the statement, such
        as one with the current time, has to be planned for each.
        """
        if not self.is_repeatable:
            return None
        for table in self.tables:
            table.refresh()
        writing = self.options.for_tasks(query)
        access = {topic: self.loop.reading_access([topic]) for topic in self.views}
        depends = (writing, access, self.views, [table.content_version for table in self.tables])
        if self._kept[0] != depends:
            for topic, view in self.views.items():
                frame = view.frame_of_job(self.spark, self.loop.options.brokers, self.accumulator, access[topic])
                frame.createOrReplaceTempView(f"`{topic}`")
            job = written_by_job(as_messages(self.frame(), self.options), writing)
            self._kept = depends, job if can_rerun(job) else None
        return self._kept[1]

    def result(self, plan: Plan) -> DataFrame:
        """Return the statement's rows over the input of a batch."""
        for topic, view in self.views.items():
            frame = view.frame(self.spark, self.loop, plan.of(topic), self.accumulator)
            frame.createOrReplaceTempView(f"`{topic}`")
        return self.frame()

    def frame(self) -> DataFrame:
        """Return the statement's rows over the current views."""
        for table in self.tables:
            table.refresh()
        rows = self._rows()
        return rows.select(*_WHOLE) if self._is_whole(rows) else rows

    def grow(self, new_fields: Mapping[str, pa.Schema]) -> bool:
        """Add new payload fields; return whether they change the statement's result.

        If the statement cannot be run with them, it continues without them: a new message must not break a running
        pipeline.
        """
        larger = self.schemas.grown_by(new_fields)
        if larger is None:
            return False
        before = self.views
        self._take(larger)
        StoredSchemas(self.folder / _SCHEMAS).write(self.schemas.inferred)
        return any(self.views[topic].columns != before[topic].columns for topic in before)

    def marked(self, topic: str, stream: DataFrame) -> DataFrame:
        """Add a topic's watermark to its stream, if it has one."""
        watermark = self.watermarks.get(topic)
        return stream if watermark is None else explain_errors("", lambda: stream.withWatermark(*watermark))

    def close(self) -> None:
        for table in self.tables:
            table.close()

    def begin(self, known: PayloadSchemas) -> None:
        """Analyse the statement, if necessary without fields that were found since its last run."""
        try:
            self.analyse()
        except InvalidSetting as error:
            if known.inferred == self.schemas.inferred or not known.inferred:
                raise
            self.schemas = known
            try:
                self.analyse()
            except InvalidSetting:
                raise error from None

    def analyse(self) -> None:
        """Analyse the statement with the known fields; raise `InvalidSetting` if that fails."""
        self.whole = {
            topic: view_of(topic, self.schemas.fields(topic), by_schema=self.schemas.by_schema)
            for topic in self.statement.topics
        }
        for topic, view in self.whole.items():
            view.example(self.spark).createOrReplaceTempView(f"`{topic}`")
        rows = self.frame()
        as_messages(rows, self.options)
        plan = QueryPlan(rows)
        if not plan.reads_topics:
            raise InvalidSetting("the statement reads no topic outside of conditions; join with it instead")
        plan.check_sets()
        self.needs_state = plan.needs_earlier_messages
        self.is_repeatable = plan.is_repeatable
        self.output_mode = UPDATE if plan.aggregates and not self.watermarks else APPEND
        # Messages that are written as they are have every column, and the columns of a state cannot change.
        is_fixed = plan.needs_earlier_messages or self._is_whole(self._rows())
        used = plan.used | {column for column, _ in self.watermarks.values()}
        evolving = {
            topic: replace(
                view, evolves=not is_fixed and self.schemas.grows(topic) and self._uses_new_fields(view, plan)
            )
            for topic, view in self.whole.items()
        }
        self.views = {topic: view.narrowed(used) for topic, view in evolving.items()}
        try:
            self._check_stream()
        except InvalidSetting:
            # A statement may name columns only to exclude them, so they have to exist.
            self.views = evolving
            self._check_stream()

    # -- internals ------------------------------------------------------------------------------------------------

    def _rows(self) -> DataFrame:
        text = self.statement.text
        return explain_errors(text, lambda: QueryPlan(self.spark.sql(text)).rows())

    def _take(self, larger: PayloadSchemas) -> None:
        previous = self.schemas, self.whole, self.views, self.needs_state, self.is_repeatable, self.output_mode
        self.schemas = larger
        try:
            self.analyse()
        except InvalidSetting:
            self.schemas, self.whole, self.views, self.needs_state, self.is_repeatable, self.output_mode = previous
            self.views = {topic: replace(view, evolves=False) for topic, view in self.views.items()}

    def _uses_new_fields(self, view: TopicView, plan: QueryPlan) -> bool:
        """Whether new payload fields could occur in rows without being named."""
        return self.statement.has_star or not view.structs.isdisjoint(plan.whole_columns)

    def _check_stream(self) -> None:
        """Have Spark refuse operations that are impossible on a stream of messages, even if it is run in batches.

        Batch by batch, all rows of a table would be repeated with every batch, which a stream refuses.
        """
        for topic, view in self.views.items():
            self.marked(topic, view.stream_example(self.spark)).createOrReplaceTempView(f"`{topic}`")
        plan = QueryPlan(self.frame())
        explain_errors(self.statement.text, lambda: plan.check_stream(self.output_mode))

    def _is_whole(self, rows: DataFrame) -> bool:
        return any(rows.columns == [column.name for column in view.columns] for view in self.whole.values())


def prepare(
    pipeline: Pipeline, context: JobContext, settings: TransformSettings, loop: BatchLoop
) -> PreparedQuery | None:
    """Prepare a statement; None while a topic whose columns have to be inferred has no message.

    Raise `InvalidSetting` with Spark's message if Spark would not run it.
    """
    # Views belong to a session, and pipelines may have views of the same name.
    spark = context.spark.newSession()
    for name, value in _SETTINGS.items():
        spark.conf.set(name, value)
    _drop_forbidden(spark)
    register_functions(spark, settings)
    tables = named_texts("tables", settings.tables)
    statement = read_statement(settings.sql, tables, spark)
    if settings.into in statement.topics:
        raise InvalidSetting(f"the statement reads the topic {settings.into!r} that it writes, and would never end")
    folder = Path(context.folder, str(pipeline.pipeline_id))
    stream = _stream_folder(folder, settings)
    fixed = StoredSchemas(stream / _SCHEMAS)
    stored = StoredSchemas(folder / _SCHEMAS)
    of_stream = fixed.read()
    given, watermarks = parse_schemas(named_texts("schemas", settings.schemas)), settings.delays()
    _check_topics("schemas", given, statement)
    _check_topics("watermarks", watermarks, statement)
    known = PayloadSchemas(
        given,
        of_stream or _known_columns(stored, context),
        decodes=settings.decode != NO_DECODING,
        by_schema=settings.decode == BY_SCHEMA,
    )
    schemas = known if of_stream else _sampled(known, statement, loop)
    if schemas is None:
        return None
    prepared = PreparedQuery(
        spark=spark,
        loop=loop,
        statement=statement,
        options=replace(loop.options_for(settings.into), schema=settings.into_schema or None),
        folder=folder,
        stream_folder=stream,
        watermarks=watermarks,
        schemas=schemas,
        accumulator=FindingsAccumulator(spark),
        tables=tuple(LakeView(spark, name, tables[name]) for name in statement.tables),
    )
    prepared.begin(known)
    if prepared.schemas.inferred != known.inferred:
        stored.write(prepared.schemas.inferred)
    if prepared.needs_state and not of_stream:
        fixed.write(prepared.schemas.inferred)
    return prepared


def _known_columns(stored: StoredSchemas, context: JobContext) -> Mapping[str, StructType]:
    """Return the inferred columns; those of a backfilled pipeline come first, and the backfill's own are added."""
    if context.backfilled is None:
        return stored.read()
    of_pipeline = StoredSchemas(Path(context.folder, str(context.backfilled), _SCHEMAS)).read()
    both = PayloadSchemas({}, of_pipeline, decodes=True)
    own = {topic: to_arrow(schema) for topic, schema in stored.read().items()}
    return (both.grown_by(own) or both).inferred


def try_statement(spark: SparkSession, folder: str) -> None:
    """Prepare and evaluate a statement over no topic, so that everything is loaded for the first real one."""
    settings = {
        "sql": "SELECT key, id + 1 AS id FROM warm WHERE id >= 0",
        "into": "out",
        "schemas": '{"warm": "id long"}',
    }
    pipeline = Pipeline(pipeline_id=uuid4(), name="warm", kind=PipelineKind.TRANSFORM, overrides=settings)
    context = JobContext(spark=spark, brokers="127.0.0.1:0", lake=folder, folder=folder)
    parsed = TransformSettings.from_strings(settings)
    prepared = prepare(pipeline, context, parsed, BatchLoop(pipeline, context, parsed))
    if prepared is not None:
        prepared.try_rows({"key": [b"a"], "id": [1]})
        prepared.close()


def _drop_forbidden(spark: SparkSession) -> None:
    """Remove functions from a session, however a statement calls them."""
    jvm: Any = spark.sparkContext._jvm
    registry = spark._jsparkSession.sessionState().functionRegistry()
    catalog, schema = jvm.scala.Option.apply("system"), jvm.scala.Option.apply("builtin")
    for name in FORBIDDEN:
        registry.dropFunction(jvm.org.apache.spark.sql.catalyst.FunctionIdentifier(name, schema, catalog))


def _stream_folder(folder: Path, settings: TransformSettings) -> Path:
    """Return the folder of a statement's state; another statement has another one."""
    fingerprint = json.dumps([settings.sql, settings.watermarks, settings.schemas, settings.decode])
    return folder / f"stream-{sha256(fingerprint.encode()).hexdigest()[:16]}"


def _sampled(known: PayloadSchemas, statement: Statement, loop: BatchLoop) -> PayloadSchemas | None:
    """Add the fields of the newest messages to the known ones; None if a topic has neither."""
    schemas: dict[str, pa.Schema] = {}
    for topic in filter(known.grows, statement.topics):
        fields = registered_fields(loop, topic) if known.by_schema else find_fields(loop, topic)
        if fields is not None:
            schemas[topic] = fields
        elif topic not in known.inferred:
            return None
    return known.grown_by(schemas) or known


def _check_topics(setting: str, named: Iterable[str], statement: Statement) -> None:
    """Raise `InvalidSetting` for a setting that names topics which the statement does not read."""
    for topic in named:
        if topic not in statement.topics:
            hint = suggestion(topic, statement.topics) or f"; it reads: {', '.join(statement.topics)}"
            raise InvalidSetting(f"{setting} names {topic!r}, a topic that the statement does not read{hint}")


_TYPES: Final = {
    "str": "string",
    "int": "bigint",
    "float": "double",
    "bool": "boolean",
    "bytes": "binary",
    "Decimal": "decimal(38,18)",
    "datetime": "timestamp",
    "date": "date",
}
"""Spark's types by the annotations of Python; anything else is a type in Spark's notation."""
_OPTIONAL: Final = re.compile(r"(?:\w+\.)?Optional\[(.*)\]|(.*?)\s*\|\s*None")


def register_functions(spark: SparkSession, settings: TransformSettings) -> None:
    """Make the functions of a statement callable; raise `InvalidSetting` if one cannot be."""
    code = named_texts(FUNCTIONS_CODE, settings.functions_code)
    modules: dict[str, ModuleType] = {}
    for name, module in settings.modules().items():
        if module not in modules:
            modules[module] = _module(module, code.get(module))
        function = getattr(modules[module], name, None)
        if not callable(function):
            raise InvalidSetting(f"module {module!r} has no function {name!r}")
        if hasattr(function, "evalType") and hasattr(function, "returnType"):
            spark.udf.register(name, _marked_udf(function))
        else:
            spark.udf.register(name, marked_function(function), returned_type(name, function))


def _marked_udf(made: Any) -> Any:
    """Return a function made by Spark's `@udf` or `@pandas_udf` that marks its errors."""
    from pyspark.sql.udf import UserDefinedFunction

    function = marked_function(made.func)
    return UserDefinedFunction(function, made.returnType, None, made.evalType, made.deterministic)


def returned_type(name: str, function: Any) -> str:
    """Return the type of a function's results, in Spark's notation, by its annotation."""
    annotation = getattr(function, "__annotations__", {}).get("return")
    if annotation is None:
        raise InvalidSetting(f"declare what function {name!r} returns: `def {name}(…) -> float`")
    is_type = isinstance(annotation, type)
    text = annotation.__name__ if is_type else str(annotation).strip("'\"")
    match = _OPTIONAL.fullmatch(text)
    text = text if match is None else (match[1] or match[2])
    return _TYPES.get(text.rpartition(".")[2], text)


def _module(name: str, code: str | None) -> ModuleType:
    if code is not None:
        return load_module(code, f"millstream_functions_{name.replace('.', '_')}", f"<{name}.py>")
    try:
        return import_module(name)
    except ImportError as error:
        raise InvalidSetting(f"the module {name!r} of a function cannot be imported: {error}") from error


def as_messages(frame: DataFrame, options: WriteOptions) -> DataFrame:
    """Convert a frame to the columns of messages; raise `InvalidSetting` if it cannot be written.

    A statement with a column `value` writes messages directly: `value`, and `key`, `headers`, `partition` and
    `timestamp` if it has them. Otherwise the columns are the fields of a JSON object in the value, or of what a schema
    encodes, except `key`, which is the key.
    """
    twice = [name for name in frame.columns if [column.lower() for column in frame.columns].count(name.lower()) > 1]
    if twice:
        raise InvalidSetting(f"the statement has two columns {twice[0]!r}; rename one of them with AS")
    if "value" not in frame.columns:
        from pyspark.sql import functions

        kinds = dict(frame.dtypes)
        names = [name for name in frame.columns if name != "key"]
        if not names:
            raise InvalidSetting("the statement selects only a key; add a column `value`, or others")
        row = functions.struct(*(f"`{name}`" for name in names))
        columns = [(row if options.schema is not None else functions.to_json(row)).alias("value")]
        if "key" in frame.columns:
            key = functions.col("key")
            columns.insert(0, key if kinds["key"] in _AS_THEY_ARE else key.cast("string").alias("key"))
        frame = frame.select(*columns)
    check_columns(frame.schema, options)
    return frame


def written(frame: DataFrame, options: WriteOptions, batch: Batch) -> DataFrame:
    """Return the parts that the tasks of a job write, as rows."""
    return frame.mapInArrow(MarkedTask(_writing(options.for_tasks(batch.query), lambda: batch)), PART_SCHEMA)


def written_by_job(frame: DataFrame, options: WriteOptions) -> DataFrame:
    """Return the written parts for the batch that each job passes to its tasks; the options are those of tasks."""
    return frame.mapInArrow(MarkedTask(_writing(options, lambda: batch_of_job().batch)), PART_SCHEMA)


def _writing(
    options: WriteOptions, batch: Callable[[], Batch]
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from as_row(write_part(options, batch(), iter(batches)))

    return write
