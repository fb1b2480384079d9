"""What landing would make of the newest messages: the columns, some rows, and what would be quarantined."""

from __future__ import annotations

import json
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
CHARACTERS_MAX: Final = 1024
"""The most characters of a value that are shown."""
ROW_BYTES_MAX: Final = 16 * 1024
"""The most that is shown of a row: all rows together have to fit into one answer."""


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
    """Make a row readable: bytes as text, and what JSON does not know as text too; cut what is long."""
    shown: dict[str, Any] = {}
    left = ROW_BYTES_MAX
    for name, value in row.items():
        part = _shown(value)
        size = len(name) + len(json.dumps(part))
        if size > left and isinstance(part, dict | list):
            part = _cut(json.dumps(part, ensure_ascii=False))
            size = len(name) + len(json.dumps(part))
        left -= size
        if left < 0:
            shown["…"] = f"{len(row) - len(shown)} more columns"
            break
        shown[name] = part
    return shown


def _shown(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        # A character has at most four bytes.
        return _cut(bytes(value[: 4 * (CHARACTERS_MAX + 1)]).decode("utf-8", "replace"))
    if isinstance(value, dict):
        return {name: _shown(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(part) for part in value]
    return value if value is None or isinstance(value, int | float | bool) else _cut(str(value))


def _cut(text: str) -> str:
    return text if len(text) <= CHARACTERS_MAX else f"{text[:CHARACTERS_MAX]}…"
