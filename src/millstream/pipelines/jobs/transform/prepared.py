"""A statement made ready to run: its topics as views with their columns, its tables, and what Spark thinks of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from millstream.core.errors import InvalidSetting
from millstream.core.nearest import suggestion
from millstream.core.pipeline import Pipeline, TransformSettings, named_texts
from millstream.pipelines.jobs.batch_loop import BatchLoop, Plan
from millstream.pipelines.jobs.findings import Notebook
from millstream.pipelines.jobs.job import JobContext
from millstream.pipelines.jobs.transform.lake_view import LakeView
from millstream.pipelines.jobs.transform.output_rows import as_messages
from millstream.pipelines.jobs.transform.payload_schema import KeptSchemas, PayloadSchemas, find_fields, parse_schemas
from millstream.pipelines.jobs.transform.query_plan import QueryPlan
from millstream.pipelines.jobs.transform.statement import Statement, read_statement, told_plainly
from millstream.pipelines.jobs.transform.topic_view import TopicView, view_of
from millstream.pipelines.source.options import WriteOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",
    # Batches are small and frequent: what a plan could gain by looking at itself costs more than it brings.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    # Lake tables say themselves whether they go to the messages, which keeps those in order; never the other way.
    "spark.sql.autoBroadcastJoinThreshold": "-1",
}
_WHOLE: Final = ("key", "value", "headers", "timestamp")
"""What is written of a message when all columns of its topic are asked for; where it goes is decided anew."""
_SCHEMAS: Final = "schemas.json"
APPEND: Final = "append"
UPDATE: Final = "update"


@dataclass(slots=True)
class Prepared:
    """A statement, in a session that has all of its views."""

    spark: SparkSession
    brokers: str
    statement: Statement
    options: WriteOptions
    folder: Path
    """Where the pipeline keeps what it must find again."""
    stream_folder: Path
    """Where the statement keeps its state, if it has one."""
    watermarks: Mapping[str, tuple[str, str]]
    schemas: PayloadSchemas
    notebook: Notebook
    tables: tuple[LakeView, ...] = ()
    whole: Mapping[str, TopicView] = field(default_factory=dict)
    """The views with all of their columns."""
    views: Mapping[str, TopicView] = field(default_factory=dict)
    """The views with the columns that the statement uses."""
    needs_state: bool = False
    output_mode: str = APPEND

    def result(self, plan: Plan) -> DataFrame:
        """The rows of the statement over what a batch reads."""
        for topic, view in self.views.items():
            frame = view.frame(self.spark, self.brokers, plan.of(topic), self.notebook)
            frame.createOrReplaceTempView(f"`{topic}`")
        return self.frame()

    def frame(self) -> DataFrame:
        """The rows of the statement over the views as they are now."""
        for table in self.tables:
            table.refresh()
        rows = self._rows()
        return rows.select(*_WHOLE) if self._is_whole(rows) else rows

    def grow(self, found: Mapping[str, pa.Schema]) -> bool:
        """Take in fields that were found in payloads; whether the statement gives something else because of them.

        A statement that cannot be run with them goes on without them: what worked is not to be broken by a message.
        """
        larger = self.schemas.grown_by(found)
        if larger is None:
            return False
        before = self.views
        self._take(larger)
        KeptSchemas(self.folder / _SCHEMAS).write(self.schemas.found)
        return any(self.views[topic].columns != before[topic].columns for topic in before)

    def marked(self, topic: str, stream: DataFrame) -> DataFrame:
        """A stream of a topic with its watermark, if it has one."""
        watermark = self.watermarks.get(topic)
        return stream if watermark is None else told_plainly("", lambda: stream.withWatermark(*watermark))

    def close(self) -> None:
        """Let go of tables."""
        for table in self.tables:
            table.close()

    def begin(self, known: PayloadSchemas) -> None:
        """Understand the statement, if it has to be without what was found in messages since it was run before."""
        try:
            self.understand()
        except InvalidSetting as error:
            if known.found == self.schemas.found or not known.found:
                raise
            self.schemas = known
            try:
                self.understand()
            except InvalidSetting:
                raise error from None

    def understand(self) -> None:
        """Find out what the statement means with the fields that are known; raise `InvalidSetting` if nothing."""
        self.whole = {topic: view_of(topic, self.schemas.fields(topic)) for topic in self.statement.topics}
        for topic, view in self.whole.items():
            view.example(self.spark).createOrReplaceTempView(f"`{topic}`")
        rows = self.frame()
        as_messages(rows, self.options)
        plan = QueryPlan(rows)
        if not plan.reads_topics:
            raise InvalidSetting("the statement reads no topic outside of conditions; join with it instead")
        plan.check_sets()
        self.needs_state = plan.remembers
        self.output_mode = UPDATE if plan.aggregates and not self.watermarks else APPEND
        # Messages that are written as they are have everything, and the columns of a state cannot change.
        is_fixed = plan.remembers or self._is_whole(self._rows())
        used = plan.used | {column for column, _ in self.watermarks.values()}
        evolving = {
            topic: replace(view, evolves=not is_fixed and self.schemas.grows(topic) and self._sees_more(view, plan))
            for topic, view in self.whole.items()
        }
        self.views = {topic: view.narrowed(used) for topic, view in evolving.items()}
        try:
            self._check_stream()
        except InvalidSetting:
            # It may name columns only to leave them out, which have to be there for that.
            self.views = evolving
            self._check_stream()

    # -- how ------------------------------------------------------------------------------------------------------

    def _rows(self) -> DataFrame:
        text = self.statement.text
        return told_plainly(text, lambda: QueryPlan(self.spark.sql(text)).rows())

    def _take(self, larger: PayloadSchemas) -> None:
        kept = self.schemas, self.whole, self.views, self.needs_state, self.output_mode
        self.schemas = larger
        try:
            self.understand()
        except InvalidSetting:
            self.schemas, self.whole, self.views, self.needs_state, self.output_mode = kept
            self.views = {topic: replace(view, evolves=False) for topic, view in self.views.items()}

    def _sees_more(self, view: TopicView, plan: QueryPlan) -> bool:
        """Whether fields that come to the payloads of a topic could be in rows without being named."""
        return self.statement.has_star or not view.structs.isdisjoint(plan.used_whole)

    def _check_stream(self) -> None:
        """Have Spark say what cannot be had of messages that come one after the other, whichever way it is run.

        Batch by batch, all rows of a table would be given with every batch, where a stream refuses that.
        """
        for topic, view in self.views.items():
            self.marked(topic, view.stream_example(self.spark)).createOrReplaceTempView(f"`{topic}`")
        plan = QueryPlan(self.frame())
        told_plainly(self.statement.text, lambda: plan.check_stream(self.output_mode))

    def _is_whole(self, rows: DataFrame) -> bool:
        return any(rows.columns == [one.name for one in view.columns] for view in self.whole.values())


def prepare(pipeline: Pipeline, context: JobContext, settings: TransformSettings, loop: BatchLoop) -> Prepared | None:
    """Make a statement ready; None as long as a topic whose columns are to be found has no message.

    Raises `InvalidSetting` if Spark would not run it, with what Spark says.
    """
    # Views belong to a session, and pipelines may have views of the same name.
    spark = context.spark.newSession()
    for name, value in _SETTINGS.items():
        spark.conf.set(name, value)
    tables = named_texts("tables", settings.tables)
    statement = read_statement(settings.sql, tables, spark)
    if settings.into in statement.topics:
        raise InvalidSetting(f"the statement reads the topic {settings.into!r} that it writes, and would never end")
    folder = Path(context.folder, str(pipeline.pipeline_id))
    stream = _stream_folder(folder, settings)
    fixed = KeptSchemas(stream / _SCHEMAS)
    kept = KeptSchemas(folder / _SCHEMAS)
    of_stream = fixed.read()
    given, watermarks = parse_schemas(named_texts("schemas", settings.schemas)), settings.delays()
    _check_topics("schemas", given, statement)
    _check_topics("watermarks", watermarks, statement)
    known = PayloadSchemas(given, of_stream or kept.read(), decodes=settings.decode != "none")
    schemas = known if of_stream else _sampled(known, statement, loop, context.brokers)
    if schemas is None:
        return None
    prepared = Prepared(
        spark=spark,
        brokers=context.brokers,
        statement=statement,
        options=loop.options_for(settings.into),
        folder=folder,
        stream_folder=stream,
        watermarks=watermarks,
        schemas=schemas,
        notebook=Notebook(spark),
        tables=tuple(LakeView(spark, name, tables[name]) for name in statement.tables),
    )
    prepared.begin(known)
    if prepared.schemas.found != known.found:
        kept.write(prepared.schemas.found)
    if prepared.needs_state and not of_stream:
        fixed.write(prepared.schemas.found)
    return prepared


def _stream_folder(folder: Path, settings: TransformSettings) -> Path:
    """Where a statement that remembers has its state: another statement has another one."""
    said = json.dumps([settings.sql, settings.watermarks, settings.schemas, settings.decode])
    return folder / f"stream-{sha256(said.encode()).hexdigest()[:16]}"


def _sampled(known: PayloadSchemas, statement: Statement, loop: BatchLoop, brokers: str) -> PayloadSchemas | None:
    """What is known with the fields of the youngest messages; None if there is neither of some topic."""
    found: dict[str, pa.Schema] = {}
    for topic in filter(known.grows, statement.topics):
        fields = find_fields(loop, topic, brokers)
        if fields is not None:
            found[topic] = fields
        elif topic not in known.found:
            return None
    return known.grown_by(found) or known


def _check_topics(setting: str, named: Iterable[str], statement: Statement) -> None:
    """Raise `InvalidSetting` for a setting about topics that are not in the statement."""
    for topic in named:
        if topic not in statement.topics:
            meant = suggestion(topic, statement.topics) or f"; it reads: {', '.join(statement.topics)}"
            raise InvalidSetting(f"{setting} names {topic!r}, a topic that the statement does not read{meant}")
