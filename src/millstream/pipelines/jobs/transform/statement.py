"""The SELECT statement of a transform: what it reads, and errors that show the place where it is broken.

Spark's own parser analyses it, so every statement that Spark can run is supported.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeVar

from millstream.core.errors import InvalidSetting
from millstream.core.sql import locate, read_select

if TYPE_CHECKING:
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

T = TypeVar("T")

_RELATION: Final = "UnresolvedRelation"
_WITH: Final = "UnresolvedWith"
_FUNCTION: Final = "UnresolvedFunction"
_STAR: Final = "UnresolvedStar"


@dataclass(frozen=True, slots=True)
class Statement:
    text: str
    topics: tuple[str, ...]
    tables: tuple[str, ...]
    """The lake tables among them, as named in the settings."""
    has_star: bool = False
    """Whether it selects columns that it does not name."""


def read_statement(text: str, tables: Collection[str], spark: SparkSession) -> Statement:
    """Find the topics and tables of a statement; raise `InvalidSetting` with Spark's message and the place if it is
    broken.
    """
    text = read_select(text).text
    parser: Any = spark._jsparkSession.sessionState().sqlParser()
    plan = explain_errors(text, lambda: parser.parseQuery(text))
    _check_programs(text, spark)
    own: set[str] = set()
    found: dict[str, bool] = {}
    for name, is_hidden in relations(plan, own, is_hidden=False):
        found[name] = is_hidden or found.get(name, False)
    read = [name for name in found if name.lower() not in own]
    topics = tuple(name for name in read if name not in tables)
    if not topics:
        raise InvalidSetting("the statement reads no topic: name topics as tables")
    for name in topics:
        if found[name]:
            # It would be evaluated batch by batch, which is never what is meant.
            raise InvalidSetting(f"the topic {name!r} is used in a subquery of a condition or column; join it instead")
    return Statement(text, topics, tuple(name for name in read if name in tables), _has_star(plan))


def _check_programs(text: str, spark: SparkSession) -> None:
    """Raise `InvalidSetting` for `USING 'program'`, by the tokens: parsed plans hide some of their subqueries."""
    jvm: Any = spark.sparkContext._jvm
    parsing = jvm.org.apache.spark.sql.catalyst.parser
    lexer = parsing.SqlBaseLexer(parsing.UpperCaseCharStream(jvm.org.antlr.v4.runtime.CharStreams.fromString(text)))
    kinds = [token.getType() for token in lexer.getAllTokens() if not token.getChannel()]
    quoted = (parsing.SqlBaseLexer.STRING_LITERAL, parsing.SqlBaseLexer.DOUBLEQUOTED_STRING)
    if any(before == parsing.SqlBaseLexer.USING and after in quoted for before, after in pairwise(kinds)):
        raise InvalidSetting("a statement cannot run a program: remove TRANSFORM … USING")


def elements(listed: Any) -> list[Any]:
    return [listed.apply(number) for number in range(listed.size())]


def relations(plan: Any, own: set[str], *, is_hidden: bool) -> Iterator[tuple[str, bool]]:
    """Yield the relations of a parsed statement, and whether each is inside an expression."""
    kind = plan.nodeName()
    if kind == _RELATION:
        yield _name(elements(plan.multipartIdentifier())), is_hidden
    if kind == _WITH:
        for named in elements(plan.cteRelations()):
            # These names are case-insensitive, as all names in SQL.
            own.add(named._1().lower())
            yield from relations(named._2(), own, is_hidden=is_hidden)
    for child in elements(plan.children()):
        yield from relations(child, own, is_hidden=is_hidden)
    for within in elements(plan.subqueries()):
        yield from relations(within, own, is_hidden=True)


def _has_star(plan: Any) -> bool:
    within = (
        [plan.child(), *(named._2() for named in elements(plan.cteRelations()))] if plan.nodeName() == _WITH else []
    )
    return (
        any(_is_star(element) for element in elements(plan.expressions()))
        or any(_has_star(child) for child in elements(plan.children()))
        or any(_has_star(node) for node in within)
    )


def _is_star(expression: Any) -> bool:
    kind = expression.nodeName()
    if kind == _FUNCTION and [part.lower() for part in elements(expression.nameParts())] == ["count"]:
        # count(*) counts rows, regardless of their columns.
        return False
    return kind.startswith(_STAR) or any(_is_star(child) for child in elements(expression.children()))


def _name(parts: list[str]) -> str:
    if len(parts) > 1:
        joined = ".".join(parts)
        raise InvalidSetting(f"write `{joined}` in backquotes if that is the name of a topic or a table")
    return parts[0]


def explain_errors(text: str, work: Callable[[], T]) -> T:
    """Run work on a statement, and convert Spark's errors to `InvalidSetting` with the place."""
    from pyspark.errors import AnalysisException, ParseException

    # It would log the same error again, with stack traces.
    logging.getLogger("SQLQueryContextLogger").disabled = True
    try:
        return work()
    except (AnalysisException, ParseException) as error:
        raise InvalidSetting(_message(text, error)) from None


def _message(text: str, error: PySparkException) -> str:
    message = str(error)
    for end in ("\n\n== SQL", ";\n", "\n== SQL", " SQLSTATE"):
        message = message.partition(end)[0]
    place = _place(text, error)
    return f"{message.strip()}{place}"


def _place(text: str, error: PySparkException) -> str:
    start = _start(text, error)
    if start is None:
        return ""
    place = locate(text, start, start + 1)
    return f"\nline {place.line}, column {place.column}:\n{place.excerpt}"


def _start(text: str, error: PySparkException) -> int | None:
    """Return the error's position in the text, as far as Spark gives it."""
    for context in error.getQueryContext() or ():
        if context.fragment() and context.fragment() in text:
            return int(context.startIndex())
    match = re.search(r"line (\d+),? pos (\d+)", str(error))
    if match is None:
        return None
    lines = text.splitlines(keepends=True)
    return sum(map(len, lines[: int(match[1]) - 1])) + int(match[2])
