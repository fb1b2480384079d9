"""What Spark made of a statement: whether messages are remembered, which columns of topics it uses, and how."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from millstream.core.errors import InvalidSetting
from millstream.pipelines.jobs.transform.statement import elements

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
_AGGREGATE: Final = "Aggregate"
_DISTINCT: Final = "Distinct"
_SETS: Final = frozenset({"Except", "Intersect"})
_OF_TOPIC: Final = "MapInArrow"
"""What a view of a topic has in its plan, and nothing else that a statement can say."""
_ATTRIBUTE: Final = "AttributeReference"
_WITH: Final = "WithCTE"
_INLINE: Final = "org.apache.spark.sql.catalyst.optimizer.InlineCTE"
_PARTS: Final = frozenset({"GetStructField", "GetArrayStructFields"})
"""What takes one field of something."""


class QueryPlan:
    """An analysed statement."""

    def __init__(self, frame: DataFrame) -> None:
        self._frame = frame
        self._jvm: Any = frame.sparkSession.sparkContext._jvm
        self._plan: Any = self._inlined(frame._jdf.queryExecution().analyzed())

    @cached_property
    def _nodes(self) -> list[tuple[Any, bool]]:
        return list(_nodes(self._plan))

    @property
    def reads_topics(self) -> bool:
        """Whether messages are what its rows are made of."""
        return any(of_topic for _, of_topic in self._nodes)

    @property
    def remembers(self) -> bool:
        """Whether it needs to know messages of earlier batches."""
        return any(
            of_topic and (node.nodeName() in _REMEMBERS or _joins_topics(node)) for node, of_topic in self._nodes
        )

    @property
    def aggregates(self) -> bool:
        """Whether rows may change while messages come, unless a watermark says when they are done."""
        return any(of_topic and node.nodeName() == _AGGREGATE for node, of_topic in self._nodes)

    def rows(self) -> DataFrame:
        """The rows of the statement, in which DISTINCT means: of all messages that ever came.

        Spark takes it for an aggregate, whose rows would be given again whenever a message repeats them.
        """
        if self._plan.nodeName() != _DISTINCT:
            return self._frame
        from pyspark.sql import DataFrame

        spark: Any = self._frame.sparkSession
        child = self._plan.children().apply(0)
        datasets = self._jvm.org.apache.spark.sql.classic.Dataset
        return DataFrame(datasets.ofRows(spark._jsparkSession, child), spark).dropDuplicates()

    def check_sets(self) -> None:
        """Raise `InvalidSetting` for what Spark would make aggregates of whose rows are not final."""
        kinds = {node.nodeName() for node, of_topic in self._nodes if of_topic}
        if _DISTINCT in kinds:
            raise InvalidSetting("DISTINCT, or UNION without ALL, has to be the outermost SELECT of the statement")
        if kinds & _SETS:
            raise InvalidSetting("EXCEPT and INTERSECT are not for topics; use NOT IN or IN, or a join")

    @cached_property
    def used(self) -> frozenset[str]:
        """The columns of topics that it names, also where they turn out to make no difference."""
        names: dict[int, str] = {one.exprId().id(): one.name() for one in elements(self._plan.output())}
        for node, _ in self._nodes:
            if node.nodeName() != _OF_TOPIC:
                names |= {one.exprId().id(): one.name() for one in elements(node.references().toSeq())}
        return frozenset(name for number, name in names.items() if number in self._columns)

    @cached_property
    def used_whole(self) -> frozenset[str]:
        """The columns of topics that it takes with all that is in them."""
        return frozenset(
            one.name()
            for node, _ in self._nodes
            if node.nodeName() != _OF_TOPIC
            for expression in elements(node.expressions())
            for one in _taken_whole(expression)
            if one.exprId().id() in self._columns
        )

    def check_stream(self, output_mode: str) -> None:
        """Have Spark refuse what it cannot do with a stream; the frame has to be of one."""
        modes = self._jvm.org.apache.spark.sql.streaming.OutputMode
        mode = modes.Update() if output_mode == "update" else modes.Append()
        checker = self._jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
        checker.checkForStreaming(self._plan, mode)

    def _inlined(self, plan: Any) -> Any:
        """The plan with what stands in WITH put where it is used, so that it is seen what passes through what."""
        if plan.nodeName() != _WITH:
            return plan
        loader = self._jvm.java.lang.Thread.currentThread().getContextClassLoader()
        made = self._jvm.java.lang.Class.forName(_INLINE, True, loader).getConstructors()[0]
        # What more it may be asked differs between versions of Spark, and is not wanted.
        others = [False] * (made.getParameterCount() - 1)
        return self._jvm.org.apache.spark.sql.catalyst.optimizer.InlineCTE(True, *others).apply(plan)

    @cached_property
    def _columns(self) -> frozenset[int]:
        """The columns of topics, by Spark's numbers."""
        return frozenset(
            one.exprId().id()
            for node, _ in self._nodes
            if node.nodeName() == _OF_TOPIC
            for one in elements(node.output())
        )


def _taken_whole(expression: Any) -> Iterator[Any]:
    kind = expression.nodeName()
    if kind == _ATTRIBUTE:
        yield expression
    for child in elements(expression.children()):
        if not (kind in _PARTS and child.nodeName() == _ATTRIBUTE):
            yield from _taken_whole(child)


def _joins_topics(node: Any) -> bool:
    return node.nodeName() == "Join" and all(map(_is_of_topic, elements(node.children())))


def _nodes(plan: Any) -> Iterator[tuple[Any, bool]]:
    """Every node of a plan, and whether messages pass through it."""
    yield plan, _is_of_topic(plan)
    for child in elements(plan.children()):
        yield from _nodes(child)


def _is_of_topic(plan: Any) -> bool:
    return plan.nodeName() == _OF_TOPIC or any(_is_of_topic(child) for child in elements(plan.children()))
