"""A position in a topic as users give it: the start, the end, an offset or a time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from millstream.core.errors import InvalidRequest, InvalidSetting
from millstream.core.setting import parse_duration_ms

EARLIEST_TIMESTAMP = -2
LATEST_TIMESTAMP = -1
"""The two timestamps with a special meaning in offset lookups."""

POSITION_HELP = (
    "start, end, an offset, a time (2026-01-31T12:00:00Z; local if it has no time zone) or an age (90s, 15m, 2h, 7d)"
)

_NAMES = {"start": "start", "earliest": "start", "beginning": "start", "end": "end", "latest": "end"}


class Kind(Enum):
    START = "start"
    END = "end"
    OFFSET = "offset"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Position:
    """A position in every partition of a topic; `value` is the offset, or the time in milliseconds."""

    kind: Kind
    value: int = 0

    @property
    def lookup_timestamp(self) -> int | None:
        """Return the timestamp for the offset lookup; None if the offset itself is given."""
        return {
            Kind.START: EARLIEST_TIMESTAMP,
            Kind.END: LATEST_TIMESTAMP,
            Kind.TIME: self.value,
            Kind.OFFSET: None,
        }[self.kind]


_OFFSET_DIGITS_MAX = 18


def parse_age_ms(text: str) -> int | None:
    """Parse a duration with a unit, such as 15m or 7d; None if the text is not one."""
    try:
        return None if text.strip()[-1:].isdigit() else parse_duration_ms(text, name="age")
    except InvalidSetting:
        return None


def parse_position(text: str, *, now_ms: int | None = None) -> Position:
    """Parse a position, or raise `InvalidRequest` with the accepted forms."""
    text = text.strip()
    if text.lower() in _NAMES:
        return Position(Kind(_NAMES[text.lower()]))
    if text.isascii() and text.isdigit() and len(text) <= _OFFSET_DIGITS_MAX:
        return Position(Kind.OFFSET, int(text))
    age_ms = parse_age_ms(text)
    if age_ms is not None:
        now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
        return Position(Kind.TIME, max(0, now_ms - age_ms))
    try:
        return Position(Kind.TIME, max(0, int(datetime.fromisoformat(text).astimezone().timestamp() * 1000)))
    except (ValueError, OverflowError):
        raise InvalidRequest(f"{text!r} is not a position; use {POSITION_HELP}") from None
