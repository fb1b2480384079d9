"""A statement made ready to run: its topics as views with their columns, its tables, and what Spark thinks of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.types import StructType

from millstream.model.errors import InvalidSetting
from millstream.model.pipeline import Pipeline, TransformSettings, named_texts
from millstream.pipelines.batch_loop import BatchLoop, Plan
from millstream.pipelines.job import JobContext
from millstream.pipelines.lake_view import LakeView
from millstream.pipelines.output_rows import as_messages
from millstream.pipelines.payload_schema import KeptSchemas, find_schema
from millstream.pipelines.statement import Statement, elements, read_statement, told_plainly
from millstream.pipelines.topic_view import TopicView, parse_schemas, view_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",
    # Batches are small and frequent: what a plan could gain by looking at itself costs more than it brings.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
}
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
"""What means something else for the messages of one batch than for all of them."""
_WHOLE: Final = ("key", "value", "headers", "timestamp")
"""What is written of a message when all columns of its topic are asked for; where it goes is decided anew."""
_AGGREGATES: Final = frozenset({"Aggregate", "Distinct"})
_OF_TOPIC: Final = "MapInArrow"
"""What a view of a topic has in its plan, and nothing else that a statement can say."""


@dataclass(slots=True)
class Prepared:
    """A statement, in a session that has all of its views."""

    spark: SparkSession
    brokers: str
    statement: Statement
    whole: Mapping[str, TopicView]
    """The views with all of their columns."""
    views: Mapping[str, TopicView]
    """The views with the columns that the statement uses."""
    tables: tuple[LakeView, ...] = ()
    needs_state: bool = False
    aggregates: bool = False
    """Whether rows may change while messages come, unless a watermark says when they are done."""

    def result(self, plan: Plan) -> DataFrame:
        """The rows of the statement over what a batch reads."""
        for topic, view in self.views.items():
            frame = view.frame(self.spark, self.brokers, plan.of(topic))
            frame.createOrReplaceTempView(f"`{topic}`")
        return self.frame()

    def frame(self) -> DataFrame:
        """The rows of the statement over the views as they are now."""
        for table in self.tables:
            table.refresh()
        text = self.statement.text
        rows = told_plainly(text, lambda: self.spark.sql(text))
        is_whole = any(rows.columns == [one.name for one in view.columns] for view in self.whole.values())
        return rows.select(*_WHOLE) if is_whole else rows

    def close(self) -> None:
        """Let go of tables."""
        for table in self.tables:
            table.close()


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
    schemas = _schemas(spark, pipeline, context, settings, loop, statement)
    if schemas is None:
        return None
    lake = tuple(LakeView(spark, name, tables[name]) for name in statement.tables)
    whole = {topic: view_of(topic, schemas[topic]) for topic in statement.topics}
    prepared = Prepared(spark, context.brokers, statement, whole, whole, lake)
    for topic, view in whole.items():
        view.example(spark).createOrReplaceTempView(f"`{topic}`")
    rows = prepared.frame()
    as_messages(rows, loop.options_for(settings.into))
    execution: Any = rows._jdf.queryExecution()
    nodes = list(_nodes(execution.analyzed()))
    prepared.needs_state = _remembers(nodes)
    prepared.aggregates = any(of_topic and node.nodeName() in _AGGREGATES for node, of_topic in nodes)
    used = _used(execution.analyzed())
    prepared.views = {topic: view.narrowed(used) for topic, view in whole.items()}
    return prepared


def _schemas(
    spark: SparkSession,
    pipeline: Pipeline,
    context: JobContext,
    settings: TransformSettings,
    loop: BatchLoop,
    statement: Statement,
) -> dict[str, StructType] | None:
    if settings.decode == "none":
        return {topic: StructType() for topic in statement.topics}
    given = parse_schemas(named_texts("schemas", settings.schemas))
    kept = KeptSchemas(Path(context.folder, str(pipeline.pipeline_id)))
    found = kept.read()
    missing = [topic for topic in statement.topics if topic not in given and topic not in found]
    for topic in missing:
        schema = find_schema(spark, loop, topic, context.brokers)
        if schema is None:
            return None
        found[topic] = schema
    if missing:
        kept.write(found)
    return {**found, **given}


def _remembers(nodes: list[tuple[Any, bool]]) -> bool:
    """Whether a statement needs to know messages of earlier batches."""
    if not any(of_topic for _, of_topic in nodes):
        raise InvalidSetting("the statement reads no topic outside of conditions; join with it instead")
    return any(of_topic and (node.nodeName() in _REMEMBERS or _joins_topics(node)) for node, of_topic in nodes)


def _joins_topics(node: Any) -> bool:
    return node.nodeName() == "Join" and all(map(_is_of_topic, _children(node)))


def _nodes(plan: Any) -> Iterator[tuple[Any, bool]]:
    """Every node of a plan, and whether messages pass through it."""
    yield plan, _is_of_topic(plan)
    for child in _children(plan):
        yield from _nodes(child)


def _children(plan: Any) -> list[Any]:
    return elements(plan.children())


def _used(plan: Any) -> set[str]:
    """The columns of topics that a plan names, also where they turn out to make no difference."""
    outputs: set[int] = set()
    names: dict[int, str] = {one.exprId().id(): one.name() for one in elements(plan.output())}
    for node, _ in _nodes(plan):
        if node.nodeName() == _OF_TOPIC:
            outputs |= {one.exprId().id() for one in elements(node.output())}
        else:
            names |= {one.exprId().id(): one.name() for one in elements(node.references().toSeq())}
    return {name for number, name in names.items() if number in outputs}


def _is_of_topic(plan: Any) -> bool:
    return plan.nodeName() == _OF_TOPIC or any(_is_of_topic(child) for child in _children(plan))
