"""Copying a whole catalog into another database, table by table, in one transaction."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, delete, insert, select

from millstream.broker.catalog.tables import about, metadata, topics

_ROWS_AT_ONCE: Final = 500
_FLUSH: Final = "flush"


def copy_tables(source: Connection, target: Connection, *, flush: str) -> None:
    """Replace what the target declares by what the source does.

    A topic without its own `flush` gets the one given, which it had by default where it comes from.
    """
    for table in metadata.sorted_tables:
        if table is about:
            continue
        target.execute(delete(table))
        rows = [dict(row._mapping) for row in source.execute(select(table))]
        if table is topics:
            rows = [{**row, "overrides": with_flush(row["overrides"], flush)} for row in rows]
        for at in range(0, len(rows), _ROWS_AT_ONCE):
            target.execute(insert(table), rows[at : at + _ROWS_AT_ONCE])


def with_flush(overrides: dict[str, Any], flush: str) -> dict[str, Any]:
    """Return the settings of a topic with its `flush` made explicit."""
    return {_FLUSH: flush, **overrides}


def is_empty(connection: Connection) -> bool:
    """Whether a catalog declares nothing."""
    declared = (table for table in metadata.sorted_tables if table is not about)
    return all(connection.execute(select(table).limit(1)).first() is None for table in declared)
