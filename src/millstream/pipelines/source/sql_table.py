"""Tables of Spark's catalog: `CREATE TABLE orders USING millstream OPTIONS (subscribe 'orders')`.

Spark passes the options of such a table to a Python data source once, when it asks for the columns at the table's
creation, and never again: neither reading the table nor inserting into it repeats them. What Spark does keep are the
columns with their metadata, so the options are stored there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from pyspark.sql.types import StructField, StructType

from millstream.core.errors import InvalidSetting
from millstream.pipelines.source.access import SECRET_OPTIONS
from millstream.pipelines.source.options import READ_ONLY, WRITE_ONLY

METADATA: Final = "millstream.options"
_PROVIDER: Final = "provider"
_OPTION: Final = "option."
_TOPICS: Final = ("subscribe", "subscribepattern", "assign")
ASSIGNED_BY_BROKER: Final = ("offset", "timestampType")
"""Columns of a table that cannot be written; an INSERT has them nevertheless."""


def declared_options(given: Mapping[str, str]) -> dict[str, str] | None:
    """Return the OPTIONS of a table that is being created; None for an ordinary query.

    Spark repeats them with a prefix, among the properties of the table.
    """
    if _PROVIDER not in given:
        return None
    declared = {name.removeprefix(_OPTION): text for name, text in given.items() if name.startswith(_OPTION)}
    secrets = sorted(name for name in declared if name.lower() in SECRET_OPTIONS)
    if secrets:
        raise InvalidSetting(
            f"the option {secrets[0]} would be stored in Spark's catalog; let the table sign in by tokenFile, or by "
            "MILLSTREAM_USER and MILLSTREAM_PASSWORD or MILLSTREAM_TOKEN in the environment of the session"
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
    """Return the columns of a table, each with its options."""
    kept = {METADATA: json.dumps(declared)}
    return StructType([StructField(one.name, one.dataType, one.nullable, kept) for one in schema.fields])


def stored_options(schema: StructType) -> dict[str, str] | None:
    """Return the options of the table that these columns are of; None if they are of none."""
    for one in schema.fields:
        if METADATA in one.metadata:
            found = json.loads(one.metadata[METADATA])
            return {str(name): str(text) for name, text in found.items()}
    return None


def options_to_read(schema: StructType, given: Mapping[str, str]) -> Mapping[str, str]:
    """Return the options of a query: its own, and those of the table that it reads."""
    stored = stored_options(schema)
    if stored is None and not given:
        raise InvalidSetting(
            "no option is given. Spark keeps the OPTIONS of a table only if it is created without a list of columns "
            "and without AS SELECT: choose columns with the option columns, such as 'key string, value string'"
        )
    return _merged(stored, given, WRITE_ONLY)


def options_to_write(schema: StructType, given: Mapping[str, str]) -> Mapping[str, str]:
    """Return the options of a write: its own, and those of the table that it inserts into."""
    return _merged(stored_options(schema), given, READ_ONLY)


def of_reading(declared: Mapping[str, str]) -> dict[str, str]:
    """Return those options of a table that concern reading."""
    return {name: text for name, text in declared.items() if name.lower() not in WRITE_ONLY}


def _merged(stored: Mapping[str, str] | None, given: Mapping[str, str], left_out: frozenset[str]) -> Mapping[str, str]:
    if stored is None:
        return given
    named = {name.lower() for name in given}
    kept = {name: text for name, text in stored.items() if name.lower() not in left_out and name.lower() not in named}
    return {**kept, **given}
