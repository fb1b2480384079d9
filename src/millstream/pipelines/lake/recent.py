"""What a table got lately, for whoever has to know it again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from millstream.pipelines.lake.active_files import active_files
from millstream.pipelines.lake.delta_log import DeltaLog


def landed_since(
    log: DeltaLog, files: Any, moment: datetime, columns: Sequence[str]
) -> Iterator[tuple[datetime, pa.RecordBatch]]:
    """Rows that a log knows of and that were landed in the hour of a moment or later, each with its hour;
    the newest hour comes first.
    """
    table = log.refresh()
    if table is None:
        return
    for file in sorted(active_files(table), key=lambda file: file.hour_start, reverse=True):
        if file.hour_start + timedelta(hours=1) > moment:
            with files.open_input_file(file.path) as opened:
                for batch in pq.ParquetFile(opened).iter_batches(columns=list(columns)):
                    yield file.hour_start, batch
