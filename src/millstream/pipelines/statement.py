"""The SELECT statement of a transform: what it reads, and errors that point at the place where it is broken.

What stands in it is found by the parser of filters' language; whether it can be run is for Spark to say.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from millstream.model.errors import InvalidSetting

if TYPE_CHECKING:
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

T = TypeVar("T")

_SHOWN_MAX = 120


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement, and the names in it."""

    text: str
    topics: tuple[str, ...]
    tables: tuple[str, ...]
    """Lake tables, which are named so in the settings."""
    names: frozenset[str] | None
    """Everything that may be the name of a column, in small letters; None if it asks for all columns of something."""

    def wants(self, column: str) -> bool:
        """Whether a column may be used by it."""
        return self.names is None or column.lower() in self.names


def read_statement(text: str, tables: Collection[str], spark: SparkSession) -> Statement:
    """Find out what a statement reads; raise `InvalidSetting` with Spark's message and the place if it is broken."""
    from sqlglot import exp, parse
    from sqlglot.errors import SqlglotError

    parser = spark._jsparkSession.sessionState().sqlParser()
    told_plainly(text, lambda: parser.parsePlan(text))
    try:
        found = [tree for tree in parse(text, read="spark") if tree is not None]
    except SqlglotError as error:
        said = re.sub(r"\x1b\[\d*m", "", str(error))
        raise InvalidSetting(f"the names in the statement cannot be found: {said}") from None
    if len(found) != 1 or not isinstance(found[0], exp.Query):
        raise InvalidSetting("a transform has one statement, and it is a SELECT")
    tree = found[0]
    own = {one.alias_or_name for one in tree.find_all(exp.CTE)}
    read = list(dict.fromkeys(_name(table) for table in tree.find_all(exp.Table) if _name(table) not in own))
    topics = tuple(name for name in read if name not in tables)
    if not topics:
        raise InvalidSetting("the statement reads no topic: topics stand in it as tables, by their names")
    has_all = any(True for _ in tree.find_all(exp.Star)) or any(
        join.args.get("method") for join in tree.find_all(exp.Join)
    )
    names = None if has_all else frozenset(str(one.this).lower() for one in tree.find_all(exp.Identifier))
    return Statement(text, topics, tuple(name for name in read if name in tables), names)


def told_plainly(text: str, work: Callable[[], T]) -> T:
    """Do something with a statement; what Spark says against it becomes an `InvalidSetting` that shows the place."""
    from pyspark.errors import AnalysisException, ParseException

    # It would tell the same once more, with the traces of two languages.
    logging.getLogger("SQLQueryContextLogger").disabled = True
    try:
        return work()
    except (AnalysisException, ParseException) as error:
        raise InvalidSetting(_said(text, error)) from None


def _name(table: Any) -> str:
    parts = [str(part.this) for part in table.parts]
    if len(parts) > 1:
        joined = ".".join(parts)
        raise InvalidSetting(f"write `{joined}` in backquotes if that is the name of a topic or a table")
    return parts[0]


def _said(text: str, error: PySparkException) -> str:
    message = str(error)
    for end in ("\n\n== SQL", ";\n'", ";\n+", "\n== SQL", " SQLSTATE"):
        message = message.partition(end)[0]
    place = _place(text, error)
    return f"{message.strip()}{place}"


def _place(text: str, error: PySparkException) -> str:
    start = _start(text, error)
    if start is None:
        return ""
    line_at = text.rfind("\n", 0, start) + 1
    line = text[line_at:].partition("\n")[0]
    number, column = text.count("\n", 0, start) + 1, start - line_at + 1
    shown_at = max(0, column - _SHOWN_MAX // 2)
    shown = line[shown_at : shown_at + _SHOWN_MAX]
    return f"\nline {number}, column {column}:\n  {shown}\n  {' ' * (column - 1 - shown_at)}^"


def _start(text: str, error: PySparkException) -> int | None:
    """Where in the text it is, as far as Spark says so."""
    for context in error.getQueryContext() or ():
        if context.fragment() and context.fragment() in text:
            return int(context.startIndex())
    found = re.search(r"line (\d+),? pos (\d+)", str(error))
    if found is None:
        return None
    lines = text.splitlines(keepends=True)
    return sum(map(len, lines[: int(found[1]) - 1])) + int(found[2])
