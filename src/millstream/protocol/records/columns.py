"""Records as columns: plain arrays in the layout of Arrow, with no object per record."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from millstream.core.errors import InvalidBatch
from millstream.protocol.records.batch import CONTROL_FLAG, TIMESTAMP_TYPE_FLAG, TRANSACTIONAL_FLAG
from millstream.protocol.records.layout import Bytes, Int16s, Int32s, Int64s


@dataclass(frozen=True, slots=True, kw_only=True)
class BinaryColumn:
    """A column of byte strings, some of them null."""

    offsets: Int32s
    """Row `i` is `data[offsets[i]:offsets[i + 1]]`."""
    data: Bytes
    validity: Bytes | None = None
    """A bit a row, the lowest first, set where the row is not null; None: nothing is null."""
    validity_at: int = 0
    """The bit of the first row."""
    null_count: int = 0

    def __len__(self) -> int:
        return self.offsets.size - 1

    def check(self) -> None:
        """Raise `InvalidBatch` unless every row is within the data, so that kernels can trust the offsets."""
        offsets = self.offsets
        if offsets[0] < 0 or offsets[-1] > self.data.size or np.any(offsets[1:] < offsets[:-1]):
            raise InvalidBatch("the offsets of a column do not match its data")

    def lengths(self) -> Int32s:
        """Return the length of every row, -1 for null."""
        lengths = np.diff(self.offsets)
        if self.validity is not None:
            lengths[~self.is_valid()] = -1
        return lengths

    def is_valid(self) -> npt.NDArray[np.bool_]:
        """Return, for every row, whether it is not null."""
        if self.validity is None:
            return np.ones(len(self), np.bool_)
        bits = np.unpackbits(self.validity, count=self.validity_at + len(self), bitorder="little")
        return bits[self.validity_at :].view(np.bool_)

    def to_list(self) -> list[bytes | None]:
        """Return every row as an object; for small columns."""
        data = self.data.tobytes()
        bounds = pairwise(self.offsets.tolist())
        return [
            data[start:end] if valid else None
            for (start, end), valid in zip(bounds, self.is_valid().tolist(), strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderColumn:
    """The headers of records: those of row `i` are `offsets[i]` up to `offsets[i + 1]` of the keys and values."""

    offsets: Int32s
    keys: BinaryColumn
    """UTF-8, never null."""
    values: BinaryColumn

    def __len__(self) -> int:
        return self.offsets.size - 1

    def to_list(self) -> list[tuple[tuple[str, bytes | None], ...]]:
        """Return every row as a tuple of headers; for small columns."""
        headers = [
            ((key or b"").decode(), value)
            for key, value in zip(self.keys.to_list(), self.values.to_list(), strict=True)
        ]
        return [tuple(headers[start:end]) for start, end in pairwise(self.offsets.tolist())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Some records. A field that was not requested is None; so is one that no record to be written has."""

    offsets: Int64s
    timestamps_ms: Int64s
    attributes: Int16s
    """For every row, the attributes of the batch it came in."""
    keys: BinaryColumn | None = None
    values: BinaryColumn | None = None
    headers: HeaderColumn | None = None

    def __len__(self) -> int:
        return self.offsets.size

    @property
    def timestamp_types(self) -> Int32s:
        """For every row, `CREATE_TIME` or `LOG_APPEND_TIME`."""
        return self._has(TIMESTAMP_TYPE_FLAG).astype(np.int32)

    @property
    def is_transactional(self) -> npt.NDArray[np.bool_]:
        """For every row, whether it was written in a transaction."""
        return self._has(TRANSACTIONAL_FLAG)

    @property
    def is_control(self) -> npt.NDArray[np.bool_]:
        """For every row, whether it is a transaction marker instead of data."""
        return self._has(CONTROL_FLAG)

    def _has(self, flag: int) -> npt.NDArray[np.bool_]:
        return (self.attributes & flag).astype(np.bool_)
