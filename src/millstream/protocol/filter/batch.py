"""Messages as filters see them: each part is decoded on first use, once for all filters.

A payload that is not JSON has no fields. That includes bytes that are not UTF-8, numbers that do not fit into a double,
and nesting deeper than `PAYLOAD_DEPTH_MAX`, so that the result is the same everywhere. Bytes of keys and headers that
are not UTF-8 show as replacement characters, as in Kafka's clients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from millstream.core.ids import NO_TIMESTAMP_MS
from millstream.protocol.filter.node import Column, Header, Path, Payload, Step, Uses
from millstream.protocol.filter.operation import SCALARS

if TYPE_CHECKING:
    from millstream.protocol.records.columns import BinaryColumn, Columns, HeaderColumn
    from millstream.protocol.records.record import Record

_MILLISECOND_US = 1000


class DecodedBatch(ABC):
    """Messages of one partition, and their decoded parts.

    `uses` has all parts that the filters read: their payload fields are extracted in one pass. A
    filter that reads other fields gets them too, but each payload is then parsed again.
    """

    def __init__(self, *, topic: str, partition: int, uses: Uses) -> None:
        self.topic = topic
        self.partition = partition
        self._uses = uses
        self._columns: dict[Column | Header | Payload, list[Any]] = {}
        self.payloads_parsed = 0

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _offsets(self) -> list[int]: ...

    @abstractmethod
    def _timestamps_ms(self) -> list[int]: ...

    @abstractmethod
    def _keys(self) -> list[str | None]: ...

    @abstractmethod
    def _payloads(self) -> Sequence[bytes | None]: ...

    @abstractmethod
    def _headers(self, name: str) -> list[str | None]: ...

    def of_batch(self, source: Column) -> str | int:
        """Return a value that all of the messages share."""
        return self.topic if source.name == "topic" else self.partition

    def column(self, source: Column | Header | Payload) -> list[Any]:
        """Return the values of one source, one per message."""
        known = self._columns.get(source)
        if known is not None:
            return known
        match source:
            case Header():
                self._columns[source] = self._headers(source.name)
            case Payload():
                self._parse(source)
            case Column():
                self._columns[source] = self._plain(source.name)
        return self._columns[source]

    def _plain(self, name: str) -> list[Any]:
        if name == "key":
            return self._keys()
        if name == "offset":
            return self._offsets()
        return [None if at == NO_TIMESTAMP_MS else at * _MILLISECOND_US for at in self._timestamps_ms()]

    def _parse(self, source: Payload) -> None:
        # Loaded with the first filter that reads payloads.
        known = {known.path for known in self._columns if isinstance(known, Payload)}
        fields = read_fields(self._payloads(), (self._uses.paths | {source.path}) - known)
        self._columns.update({Payload(path): column for path, column in fields.items()})
        self.payloads_parsed += len(self)


class ColumnBatch(DecodedBatch):
    """Messages from the compiled codec, with at least the fields that `uses` names."""

    def __init__(self, columns: Columns, *, topic: str, partition: int, uses: Uses) -> None:
        super().__init__(topic=topic, partition=partition, uses=uses)
        self._source = columns

    def __len__(self) -> int:
        return len(self._source)

    def _offsets(self) -> list[int]:
        return [*self._source.offsets.tolist()]

    def _timestamps_ms(self) -> list[int]:
        return [*self._source.timestamps_ms.tolist()]

    def _keys(self) -> list[str | None]:
        keys = self._source.keys
        return [None] * len(self) if keys is None else column_texts(keys)

    def _payloads(self) -> Sequence[bytes | None]:
        values = self._source.values
        return [None] * len(self) if values is None else values.to_list()

    def _headers(self, name: str) -> list[str | None]:
        headers = self._source.headers
        return [None] * len(self) if headers is None else header_texts(headers, name)


class RecordBatch(DecodedBatch):
    """A few messages as plain records, too few to load the compiled codec for."""

    def __init__(self, records: Sequence[Record], *, topic: str, partition: int, uses: Uses) -> None:
        super().__init__(topic=topic, partition=partition, uses=uses)
        self._source = records

    def __len__(self) -> int:
        return len(self._source)

    def _offsets(self) -> list[int]:
        return [record.offset for record in self._source]

    def _timestamps_ms(self) -> list[int]:
        return [record.timestamp_ms for record in self._source]

    def _keys(self) -> list[str | None]:
        return [text(record.key) for record in self._source]

    def _payloads(self) -> Sequence[bytes | None]:
        return [record.value for record in self._source]

    def _headers(self, name: str) -> list[str | None]:
        return [last_header(record.headers, name) for record in self._source]


PAYLOAD_DEPTH_MAX = 128
BYTES_MAX = 16 * 1024 * 1024
"""A larger payload counts as not JSON."""

PARSED_BYTES = 64 * 1024
"""How many bytes of payloads are kept parsed at a time. Python objects take up to thirty times the size of their text,
and creating objects takes half the time if they are dropped before they leave the processor's caches."""

NESTED = object()
"""Stands for an object or array; filters only know that it is not NULL."""

_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_decode = msgspec.json.Decoder().decode


def read_fields(payloads: Sequence[bytes | None], paths: Collection[Path]) -> dict[Path, list[Any]]:
    """Return the value of every path in every payload; None where it is missing."""
    fields: dict[Path, list[Any]] = {path: [] for path in paths}
    for chunk in _payload_chunks(payloads):
        walked: dict[Path, list[Any]] = {(): _parse_all(chunk)}
        for path, column in fields.items():
            value = _walk_path(walked, path)
            column += value if len(chunk) == len(payloads) else _without_trees(value)
    return fields


def _payload_chunks(payloads: Sequence[bytes | None]) -> Iterator[Sequence[bytes | None]]:
    """Yield runs of payloads of about `PARSED_BYTES`; a large payload ends its run."""
    start = size = 0
    for at, payload in enumerate(payloads):
        size += len(payload) if payload is not None else 0
        if size > PARSED_BYTES:
            yield payloads[start : at + 1]
            start, size = at + 1, 0
    if start < len(payloads):
        yield payloads[start:] if start else payloads


def _parse_all(payloads: Sequence[bytes | None]) -> list[Any]:
    """Parse all at once if all are JSON, as they usually are; otherwise one by one."""
    if payloads and len(payloads[-1] or b"") > BYTES_MAX:
        return [_parse(payload) for payload in payloads]
    try:
        parsed = [None if payload is None else _decode(payload) for payload in payloads]
    except _UNREADABLE:
        return [_parse(payload) for payload in payloads]
    for at, payload in enumerate(payloads):
        if (
            payload is not None
            and len(payload) > 2 * PAYLOAD_DEPTH_MAX
            and _may_be_deep(payload)
            and _is_deep(parsed[at])
        ):
            parsed[at] = None
    return parsed


def _parse(payload: bytes | None) -> Any:
    if payload is None or len(payload) > BYTES_MAX:
        return None
    try:
        parsed = _decode(payload)
    except _UNREADABLE:
        return None
    return None if _may_be_deep(payload) and _is_deep(parsed) else parsed


def _may_be_deep(payload: bytes) -> bool:
    return payload.count(b"[") + payload.count(b"{") > PAYLOAD_DEPTH_MAX


def _is_deep(parsed: Any) -> bool:
    level: list[Any] = [parsed]
    for _ in range(PAYLOAD_DEPTH_MAX):
        level = [inner for outer in level for inner in _inner(outer) if inner.__class__ in (dict, list)]
        if not level:
            return False
    return True


def _inner(outer: Any) -> Iterable[Any]:
    if outer.__class__ is dict:
        return outer.values()
    return outer if outer.__class__ is list else ()


def _walk_path(walked: dict[Path, list[Any]], path: Path) -> list[Any]:
    """Return the column of a path; common prefixes are walked once."""
    known = len(path)
    while path[:known] not in walked:
        known -= 1
    column = walked[path[:known]]
    for at in range(known, len(path)):
        column = walked[path[: at + 1]] = _step_into(column, path[at])
    return column


def _step_into(column: list[Any], step: Step) -> list[Any]:
    if isinstance(step, str):
        return [outer.get(step) if outer.__class__ is dict else None for outer in column]
    return [outer[step] if outer.__class__ is list and step < len(outer) else None for outer in column]


def _without_trees(column: list[Any]) -> list[Any]:
    return [field if field is None or field.__class__ in SCALARS else NESTED for field in column]


def text(data: bytes | None) -> str | None:
    return None if data is None else data.decode("utf-8", "replace")


def column_texts(column: BinaryColumn) -> list[str | None]:
    """Decode every row of a column."""
    data = column.data.tobytes()
    if not data.isascii():
        return [text(row) for row in column.to_list()]
    whole = data.decode("ascii")
    rows: list[str | None] = [whole[start:end] for start, end in pairwise(column.offsets.tolist())]
    if column.null_count:
        import numpy as np

        for row in np.flatnonzero(~column.is_valid()).tolist():
            rows[row] = None
    return rows


def header_texts(headers: HeaderColumn, name: str) -> list[str | None]:
    """Return the last header of a name for every record; headers of other names create no Python objects."""
    import numpy as np

    encoded_name = np.frombuffer(name.encode("utf-8", "replace"), np.uint8)
    starts = headers.keys.offsets[:-1]
    matches = np.flatnonzero(np.diff(headers.keys.offsets) == encoded_name.size)
    for at, byte in enumerate(encoded_name.tolist()):
        matches = matches[headers.keys.data[starts[matches] + at] == byte]
    texts: list[str | None] = [None] * len(headers)
    rows = np.searchsorted(headers.offsets, matches, side="right") - 1
    values = headers.values
    data = values.data.tobytes()
    starts, ends, valid = values.offsets[matches], values.offsets[matches + 1], values.is_valid()[matches]
    bounds = zip(rows.tolist(), starts.tolist(), ends.tolist(), valid.tolist(), strict=True)
    for row, start, end, is_valid in bounds:
        texts[row] = data[start:end].decode("utf-8", "replace") if is_valid else None
    return texts


def last_header(headers: Sequence[tuple[str, bytes | None]], name: str) -> str | None:
    for key, value in reversed(headers):
        if key == name:
            return text(value)
    return None
