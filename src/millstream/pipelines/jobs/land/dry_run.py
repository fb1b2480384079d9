"""The preview of landing the newest messages: the columns, some rows, and the messages to be quarantined."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.pipelines.lake.merging import DELETED, KEY, ORDER
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table_file import WrittenFile

SAMPLED: Final = 100
"""The number of messages per partition in the sample."""
SAMPLED_BYTES_MAX: Final = 16 * 1024 * 1024
"""The approximate maximum size of a topic's sample; partitions with large messages contribute fewer of them."""
SAMPLED_TOPICS_MAX: Final = 20
SHOWN: Final = 20
CHARACTERS_MAX: Final = 1024
"""The most characters of a value that are shown."""
ROW_BYTES_MAX: Final = 16 * 1024
"""The most that is shown of a row: all rows together have to fit into one response."""


class SampleRows:
    """Counts the rows that files would get, and keeps some of them as they are shown."""

    folder: Final = ""

    def __init__(self) -> None:
        self.count = 0
        self.deletes = 0
        """Changes that delete their key; they have no row to show."""
        self.shown: list[dict[str, Any]] = []
        self.reasons: Counter[str] = Counter()
        """The reasons of quarantined rows."""

    @property
    def storage(self) -> Storage:
        """Not available: a dry run stores nothing."""
        raise NotImplementedError("rows of a dry run are not stored")

    def write(self, batch: pa.RecordBatch) -> None:
        """Count rows, and keep the first ones."""
        self.count += len(batch)
        if DELETED in batch.schema.names:
            deleted = batch.column(DELETED)
            self.deletes += deleted.true_count
            batch = batch.filter(pc.invert(deleted)).drop_columns(
                [name for name in (KEY, ORDER, DELETED) if name in batch.schema.names]
            )
        self.shown += map(shown_row, batch.slice(0, SHOWN - len(self.shown)).to_pylist())
        if "reason" in batch.schema.names:
            self.reasons.update(batch.column("reason").to_pylist())

    def close(self) -> list[WrittenFile]:
        """Return no files."""
        return []

    def abort(self) -> None:
        self.count = self.deletes = 0
        self.shown.clear()
        self.reasons.clear()

    def discard(self, written: Iterable[WrittenFile]) -> None:
        """Do nothing: there are no files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LandedSample:
    topic: str
    table: str
    exists: bool
    """Whether the table exists already."""
    columns: pa.Schema
    added: Sequence[str]
    """The columns that the table would get."""
    dropped: Sequence[str]
    """The fields that have no column."""
    sampled: int
    """Messages in the sample."""
    rows: SampleRows
    quarantined: SampleRows

    def as_document(self) -> dict[str, Any]:
        from pyspark.sql.pandas.types import from_arrow_type

        return {
            "topic": self.topic,
            "table": self.table,
            "exists": self.exists,
            "columns": {field.name: from_arrow_type(field.type).simpleString() for field in self.columns},
            "added": list(self.added),
            "dropped": list(self.dropped),
            "sampled": self.sampled,
            "landed": self.rows.count,
            "deletes": self.rows.deletes,
            "rows": self.rows.shown,
            "quarantined": self.quarantined.count,
            "reasons": {_shorten(reason): count for reason, count in self.quarantined.reasons.most_common(SHOWN)},
        }


def shown_row(row: dict[str, Any]) -> dict[str, Any]:
    """Make a row readable: bytes and types that JSON lacks as text; long values truncated."""
    shown: dict[str, Any] = {}
    remaining_bytes = ROW_BYTES_MAX
    for name, value in row.items():
        part = _displayed_value(value)
        size = len(name) + len(json.dumps(part))
        if size > remaining_bytes and isinstance(part, dict | list):
            part = _shorten(json.dumps(part, ensure_ascii=False))
            size = len(name) + len(json.dumps(part))
        remaining_bytes -= size
        if remaining_bytes < 0:
            shown["…"] = f"{len(row) - len(shown)} more columns"
            break
        shown[name] = part
    return shown


def _displayed_value(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        # A character has at most four bytes.
        return _shorten(bytes(value[: 4 * (CHARACTERS_MAX + 1)]).decode("utf-8", "replace"))
    if isinstance(value, dict):
        # If field names are data, most fields of an object are null.
        return {name: _displayed_value(part) for name, part in value.items() if part is not None}
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return {str(name): _displayed_value(part) for name, part in value}
    if isinstance(value, list):
        return [_displayed_value(part) for part in value]
    return value if value is None or isinstance(value, int | float | bool) else _shorten(str(value))


def _shorten(text: str) -> str:
    return text if len(text) <= CHARACTERS_MAX else f"{text[:CHARACTERS_MAX]}…"
