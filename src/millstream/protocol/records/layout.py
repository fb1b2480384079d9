"""The tables that kernels fill and read.

They are structured types, so their layout is part of a kernel's signature: change it, and the kernels are compiled
again. (The cache of numba checks only the signature and the one file that holds the kernel; therefore a kernel
also imports no function and no constant from another file.)
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Number = TypeVar("Number", bound=np.generic)
Bytes = npt.NDArray[np.uint8]
Int16s = npt.NDArray[np.int16]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Table = npt.NDArray[np.void]
"""An array of one of the structured types below."""
Row = Any
"""One row of such a table."""

BATCHES = np.dtype(
    [
        ("start", np.int64),
        ("end", np.int64),
        ("records_at", np.int64),
        ("records_end", np.int64),
        ("base_offset", np.int64),
        ("last_delta", np.int64),
        ("attributes", np.int64),
        ("base_timestamp", np.int64),
        ("max_timestamp", np.int64),
        ("record_count", np.int64),
        ("crc", np.int64),
    ]
)
"""Batches: where each is in the fetch response, where its (decompressed) records are, and its header."""

RECORDS = np.dtype(
    [
        ("key_at", np.int32),
        ("key_length", np.int32),
        ("value_at", np.int32),
        ("value_length", np.int32),
        ("headers_at", np.int32),
        ("header_count", np.int32),
    ]
)
"""Records: where the fields of each lie. A length of -1 means null."""

HEADERS = np.dtype(
    [
        ("key_at", np.int32),
        ("key_length", np.int32),
        ("value_at", np.int32),
        ("value_length", np.int32),
    ]
)
"""Headers of records: where the fields of each lie."""

PARSING = np.dtype([("batch", np.int64), ("record", np.int64), ("position", np.int64), ("delta", np.int64)])
"""One row: the parser's position between two calls."""


def read_only(array: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """Return the same numbers as a read-only array: the one kind that kernels are compiled for as their input."""
    view = array.view()
    view.flags.writeable = False
    return view
