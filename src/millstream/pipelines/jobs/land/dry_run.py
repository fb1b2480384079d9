"""What landing would make of the newest messages: the columns, some rows, and what would be quarantined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.written_file import Written

SAMPLED: Final = 100
"""The number of messages per partition in the sample."""
SAMPLED_TOPICS_MAX: Final = 20
SHOWN: Final = 20


class KeptRows:
    """Takes the rows that files would get."""

    folder: Final = ""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []

    @property
    def storage(self) -> Storage:
        """There is none."""
        raise NotImplementedError("rows of a dry run are not stored")

    def write(self, batch: pa.RecordBatch) -> None:
        """Keep rows."""
        if len(batch):
            self.batches.append(batch)

    def close(self) -> list[Written]:
        """Return no files."""
        return []

    def abort(self) -> None:
        """Drop the rows."""
        self.batches.clear()

    def discard(self, written: Iterable[Written]) -> None:
        """Do nothing: there are no files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LandedSample:
    """What landing would make of a sample of one topic."""

    topic: str
    table: str
    exists: bool
    """Whether the table exists already."""
    columns: pa.Schema
    added: Sequence[str]
    """The columns that the table would get."""
    sampled: int
    """Messages in the sample."""
    rows: Sequence[pa.RecordBatch]
    quarantined: Sequence[pa.RecordBatch]

    def as_document(self) -> dict[str, Any]:
        """Return it as JSON."""
        from pyspark.sql.pandas.types import from_arrow_type

        reasons = Counter(reason for batch in self.quarantined for reason in batch.column("reason").to_pylist())
        return {
            "topic": self.topic,
            "table": self.table,
            "exists": self.exists,
            "columns": {field.name: from_arrow_type(field.type).simpleString() for field in self.columns},
            "added": list(self.added),
            "sampled": self.sampled,
            "landed": sum(map(len, self.rows)),
            "rows": [shown_row(row) for row in _first(self.rows, SHOWN)],
            "quarantined": sum(map(len, self.quarantined)),
            "reasons": dict(reasons.most_common(SHOWN)),
        }


def _first(batches: Sequence[pa.RecordBatch], count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for batch in batches:
        found += batch.slice(0, count - len(found)).to_pylist()
    return found


def shown_row(row: dict[str, Any]) -> dict[str, Any]:
    """Make a row readable: bytes as text, and what JSON does not know as text too."""
    return {name: _shown(value) for name, value in row.items()}


def _shown(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, dict):
        return shown_row(value)
    if isinstance(value, list | tuple):
        return [_shown(one) for one in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
