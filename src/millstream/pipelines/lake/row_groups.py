"""Groups of rows in the files of a table, read in the order of partitions and offsets without holding whole files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

_LOWEST: Final = -(2**62)
_HIGHEST: Final = 2**62
BATCH_ROWS: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One group, and between which rows, by partition and offset, all of its rows are."""

    path: str
    index: int
    low: tuple[int, int]
    high: tuple[int, int]


def row_groups(files: Any, paths: Iterable[str]) -> list[RowGroup]:
    """The groups of rows that files have, from their footers."""
    found = []
    for path in paths:
        footer = pq.read_metadata(files.open_input_file(path))
        positions = {footer.schema.column(at).path: at for at in range(footer.num_columns)}
        for index in range(footer.num_row_groups):
            group = footer.row_group(index)
            partitions = _bounds(group, positions.get("partition"))
            offsets = _bounds(group, positions.get("offset"))
            found.append(RowGroup(path, index, (partitions[0], offsets[0]), (partitions[1], offsets[1])))
    return found


def _bounds(group: Any, position: int | None) -> tuple[int, int]:
    """The smallest and the largest value of a column in a group; anything when it does not say."""
    statistics = None if position is None else group.column(position).statistics
    if statistics is None or not statistics.has_min_max:
        return _LOWEST, _HIGHEST
    return int(statistics.min), int(statistics.max)


def ordered(files: Any, groups: Iterable[RowGroup], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """All rows by partition and offset, with the columns of a schema, which has these two.

    What tasks wrote has one partition in a group and is in order, so that one group is held at a time. Groups that lie
    across each other, as other programs may leave them, are held and sorted together.
    """
    for together in _apart(groups):
        table = pa.concat_tables([read_group(files, group, schema) for group in together])
        if len(together) > 1 or together[0].low[0] != together[0].high[0]:
            table = table.sort_by([("partition", "ascending"), ("offset", "ascending")])
        yield from table.to_batches(max_chunksize=BATCH_ROWS)


def _apart(groups: Iterable[RowGroup]) -> Iterator[list[RowGroup]]:
    """Groups in their order, those together that lie across each other."""
    together: list[RowGroup] = []
    high = (_LOWEST, _LOWEST)
    for group in sorted(groups, key=lambda group: (group.low, group.path, group.index)):
        if together and group.low > high:
            yield together
            together = []
        high = max(high, group.high)
        together.append(group)
    if together:
        yield together


def read_group(files: Any, group: RowGroup, schema: pa.Schema) -> pa.Table:
    """The rows of one group; columns that came later are null in it."""
    with files.open_input_file(group.path) as source:
        file = pq.ParquetFile(source)
        there = [name for name in schema.names if name in file.schema_arrow.names]
        table = file.read_row_group(group.index, columns=there)
    columns = [
        table.column(field.name).cast(field.type) if field.name in there else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
