"""Lands made-up messages until a table has them all, for tests that kill it: `python -m … URL FORMAT END`.

Every seventh message is quarantined. After some steps it compacts, or widens one of several columns, which has the
offset as a whole number before and a half more from then on.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Final

import pyarrow as pa

from millstream.core.errors import Conflict
from millstream.pipelines.lake.columns import RAW
from millstream.pipelines.lake.table import open_table
from millstream_testing.lake_rows import LANDED, TOPIC, in_this_process, next_offset, rows, write, write_quarantine

NUMBERS: Final = tuple(f"n{number}" for number in range(5))


def is_bad(offset: int) -> bool:
    """Whether a message is quarantined."""
    return offset % 7 == 0


def columns(schema: pa.Schema | None) -> pa.Schema:
    """Return the columns that a table has, or gets."""
    return pa.schema([*RAW, *(pa.field(name, pa.int64()) for name in NUMBERS)]) if schema is None else schema


def good(offsets: Iterable[int], schema: pa.Schema) -> pa.RecordBatch:
    span = list(offsets)
    halves = {name: 0.5 if pa.types.is_floating(schema.field(name).type) else 0 for name in NUMBERS}
    return rows(0, span, schema, **{name: [offset + more for offset in span] for name, more in halves.items()})


def main(url: str, format: str, end: int) -> None:
    """Land messages up to an offset."""
    table = open_table(url, format=format)
    while (start := next_offset(table)) < end:
        schema = columns(table.schema())
        span = range(start, min(end, start + random.randint(1, 40)))
        files = write(table, [good((offset for offset in span if not is_bad(offset)), schema)], schema)
        bad = write_quarantine(table, 0, [offset for offset in span if is_bad(offset)])
        try:
            table.commit(files, {(TOPIC, 0): (start, span.stop)}, schema=schema, quarantined=bad)
            if random.random() < 0.1:
                table.compact(before=LANDED + timedelta(hours=1))
            if random.random() < 0.05:
                table.widen([(random.choice(NUMBERS),)], run=in_this_process, bytes_max=2**60)
        except Conflict:
            continue


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
