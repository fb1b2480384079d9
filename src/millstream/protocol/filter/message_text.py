"""Keys and headers as columns of text. Bytes that are not UTF-8 show as replacement marks, as in Kafka's clients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from millstream.protocol.records.columns import BinaryColumn, HeaderColumn


def text(data: bytes | None) -> str | None:
    """One field."""
    return None if data is None else data.decode("utf-8", "replace")


def column_texts(column: BinaryColumn) -> list[str | None]:
    """Every row of a column."""
    data = column.data.tobytes()
    if not data.isascii():
        return [text(row) for row in column.to_list()]
    whole = data.decode("ascii")
    rows: list[str | None] = [whole[start:end] for start, end in pairwise(column.offsets.tolist())]
    if column.null_count:
        for row in np.flatnonzero(~column.is_valid()).tolist():
            rows[row] = None
    return rows


def header_texts(headers: HeaderColumn, name: str) -> list[str | None]:
    """For every record the last header of a name; no Python runs for headers of other names."""
    wanted = np.frombuffer(name.encode("utf-8", "replace"), np.uint8)
    starts = headers.keys.offsets[:-1]
    found = np.flatnonzero(np.diff(headers.keys.offsets) == wanted.size)
    for at, byte in enumerate(wanted.tolist()):
        found = found[headers.keys.data[starts[found] + at] == byte]
    texts: list[str | None] = [None] * len(headers)
    rows = np.searchsorted(headers.offsets, found, side="right") - 1
    values = headers.values
    data = values.data.tobytes()
    starts, ends, valid = values.offsets[found], values.offsets[found + 1], values.is_valid()[found]
    bounds = zip(rows.tolist(), starts.tolist(), ends.tolist(), valid.tolist(), strict=True)
    for row, start, end, is_valid in bounds:
        texts[row] = data[start:end].decode("utf-8", "replace") if is_valid else None
    return texts


def last_header(headers: Sequence[tuple[str, bytes | None]], name: str) -> str | None:
    """The last header of a name."""
    for key, value in reversed(headers):
        if key == name:
            return text(value)
    return None
