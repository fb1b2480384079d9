"""Opens lake tables by the name of their format."""

from __future__ import annotations

from collections.abc import Mapping

from millstream.core.errors import InvalidSetting
from millstream.pipelines.lake.delta_log import CONFIGURATION, EVENT_TIME, DeltaLog
from millstream.pipelines.lake.delta_table import DeltaTable
from millstream.pipelines.lake.parquet_table import ParquetTable
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import LakeTable


def open_table(
    url: str, *, format: str = "delta", options: Mapping[str, str] | None = None, event_time: str = ""
) -> LakeTable:
    """Open the table at a folder or URL, which may not exist yet; then it is partitioned by the given event time.

    Object stores are configured by the usual environment variables (`AWS_ACCESS_KEY_ID`, `AWS_REGION`,
    `AWS_ENDPOINT_URL` …) and by options of the same names. A table belongs to one thread; open one per thread.
    """
    storage = Storage.at(url, options)
    configuration = {**CONFIGURATION, EVENT_TIME: event_time} if event_time else CONFIGURATION
    if format == "delta":
        return DeltaTable(storage, DeltaLog(storage, configuration=configuration))
    if format == "parquet":
        return ParquetTable(storage, configuration=configuration)
    raise InvalidSetting(f"the format of a table is delta or parquet, not {format!r}")
