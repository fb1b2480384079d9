"""Where an append went."""

from __future__ import annotations

from typing import NamedTuple

from millstream.core.ids import Offset


class AppendedRange(NamedTuple):
    """Where an append went, or where it had gone the first time when it is a duplicate."""

    base_offset: Offset
    next_offset: Offset
    append_time_ms: int
    log_start: Offset
    duplicate: bool
