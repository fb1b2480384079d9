"""Lands made-up messages until a table has them all, for tests that kill it: `python -m … URL FORMAT END`.

Every seventh message is quarantined. After some steps it compacts.
"""

from __future__ import annotations

import random
import sys
from datetime import timedelta

from millstream.lake.columns import RAW
from millstream.lake.opening import open_table
from millstream.model.errors import StalePlan
from millstream.testing.lake_rows import LANDED, TOPIC, next_offset, rows, write, write_quarantine


def is_bad(offset: int) -> bool:
    """Whether a message is quarantined."""
    return offset % 7 == 0


def main(url: str, format: str, end: int) -> None:
    """Land up to an offset."""
    table = open_table(url, format=format)
    while (start := next_offset(table)) < end:
        span = range(start, min(end, start + random.randint(1, 40)))
        files = write(table, [rows(0, [offset for offset in span if not is_bad(offset)])])
        bad = write_quarantine(table, 0, [offset for offset in span if is_bad(offset)])
        try:
            table.commit(files, {(TOPIC, 0): (start, span.stop)}, schema=RAW, quarantined=bad)
        except StalePlan:
            continue
        if random.random() < 0.1:
            table.compact(before=LANDED + timedelta(hours=1))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
