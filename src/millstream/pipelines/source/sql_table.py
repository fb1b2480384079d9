"""Tables of Spark's catalog: `CREATE TABLE orders USING millstream OPTIONS (subscribe 'orders')`.

Spark passes the options of such a table to a Python data source once, when it asks for the columns at the table's
creation, and never again: neither reading the table nor inserting into it repeats them. What Spark does keep are the
columns with their metadata, so the options are stored there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Final
from zlib import crc32

from pyspark.sql.types import StringType, StructField, StructType

from millstream.core.errors import InvalidSetting
from millstream.pipelines.source.access import SECRET_OPTIONS
from millstream.pipelines.source.options import BROKERS, READ_ONLY, WRITE_ONLY

METADATA: Final = "millstream.options"
_LIMITED: Final = "__CHAR_VARCHAR_TYPE_STRING"
"""The metadata key under which Spark stores the length limit of a text column."""
_LIMIT_MIN: Final = 2**30
_PROVIDER: Final = "provider"
_OPTION: Final = "option."
_TOPICS: Final = ("subscribe", "subscribepattern", "assign")
ASSIGNED_BY_BROKER: Final = ("offset", "timestampType")
"""Columns that an INSERT includes although they cannot be written."""


def declared_options(options: Mapping[str, str]) -> dict[str, str] | None:
    """Return the OPTIONS of a table that is being created; None for an ordinary query.

    Spark repeats them with a prefix, among the properties of the table.
    """
    if _PROVIDER not in options:
        return None
    declared = {name.removeprefix(_OPTION): text for name, text in options.items() if name.startswith(_OPTION)}
    secrets = sorted(name for name in declared if name.lower() in SECRET_OPTIONS)
    if secrets:
        raise InvalidSetting(
            f"the option {secrets[0]} would be stored in Spark's catalog; let the table sign in with tokenFile, or "
            "with MILLSTREAM_USER and MILLSTREAM_PASSWORD or MILLSTREAM_TOKEN in the environment of the session"
        )
    names = {name.lower() for name in declared}
    if "topic" in names and not names & set(_TOPICS):
        declared["subscribe"] = next(text for name, text in declared.items() if name.lower() == "topic")
    elif "topic" not in names and "subscribe" in names:
        subscribed = next(text for name, text in declared.items() if name.lower() == "subscribe")
        if "," not in subscribed:
            declared["topic"] = subscribed
    return declared


def with_options(schema: StructType, declared: Mapping[str, str]) -> StructType:
    """Return the columns of a table, each with its options.

    Spark gives the rows of an INSERT the options of its table, unless they have the columns of the table already: then
    they keep what they have, such as the options of another table that they were read from. So one column is noted as
    text of limited length, with a limit that is large and different for each table: no other rows have that column.
    """
    kept = json.dumps({"options": dict(declared), "columns": schema.names})
    limited = next((field.name for field in schema.fields if isinstance(field.dataType, StringType)), None)
    if limited is None:
        raise InvalidSetting(
            "a table needs a column of text, by which Spark recognizes its rows: add topic to the "
            "option columns, or make key or value text, as in 'key, value string'"
        )
    limit = f"varchar({_LIMIT_MIN + crc32(kept.encode()) % _LIMIT_MIN})"
    return StructType(
        [
            StructField(
                field.name,
                field.dataType,
                field.nullable,
                {METADATA: kept, **({_LIMITED: limit} if field.name == limited else {})},
            )
            for field in schema.fields
        ]
    )


def stored_options(schema: StructType) -> dict[str, str] | None:
    """Return the options of the table that these columns belong to; None if they belong to none."""
    for field in schema.fields:
        if METADATA in field.metadata:
            document = json.loads(field.metadata[METADATA])["options"]
            return {str(name): str(text) for name, text in document.items()}
    return None


def options_to_read(schema: StructType, options: Mapping[str, str]) -> Mapping[str, str]:
    """Return the options of a query: its own, and those of the table that it reads.

    A query that names its source does not read the table, even if it has the table's schema.
    """
    stored = None if _names(options, (*_TOPICS, BROKERS)) else stored_options(schema)
    if stored is None and not options:
        raise InvalidSetting(
            "no option is given. Spark keeps the OPTIONS of a table only if it is created without a list of columns "
            "and without AS SELECT: choose columns with the option columns, such as 'key string, value string'"
        )
    return _merge_options(stored, options, WRITE_ONLY)


def options_to_insert(schema: StructType, options: Mapping[str, str]) -> Mapping[str, str] | None:
    """Return the options of an INSERT: its own, and those of the table. None for any other write.

    Rows that were read from a table have its options wherever they are written. An INSERT has all columns of its table,
    as text without a limit; or as they are, if the rows are those of the table itself. Any write of such rows goes to
    the topic of the table, unless it names another.
    """
    kept = {field.metadata.get(METADATA) for field in schema.fields}
    text = kept.pop() if kept else None
    if kept or text is None or json.loads(text)["columns"] != schema.names:
        return None
    is_read = any(_LIMITED in field.metadata for field in schema.fields)
    if is_read and _names(options, ("topic", BROKERS)):
        return None
    return _merge_options(stored_options(schema), options, READ_ONLY)


def _names(texts: Mapping[str, str], options: Iterable[str]) -> bool:
    return not {name.lower() for name in texts}.isdisjoint(options)


def of_reading(declared: Mapping[str, str]) -> dict[str, str]:
    """Return those options of a table that concern reading."""
    return {name: text for name, text in declared.items() if name.lower() not in WRITE_ONLY}


def _merge_options(
    stored: Mapping[str, str] | None, options: Mapping[str, str], left_out: frozenset[str]
) -> Mapping[str, str]:
    if stored is None:
        return options
    named = {name.lower() for name in options}
    remaining = {
        name: text for name, text in stored.items() if name.lower() not in left_out and name.lower() not in named
    }
    return {**remaining, **options}
