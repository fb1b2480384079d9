"""The result of an append."""

from __future__ import annotations

from typing import NamedTuple

from millstream.core.ids import Offset


class AppendedRange(NamedTuple):
    """The offsets of an append, or of its first copy if it is a duplicate."""

    base_offset: Offset
    next_offset: Offset
    append_time_ms: int
    log_start: Offset
    duplicate: bool
