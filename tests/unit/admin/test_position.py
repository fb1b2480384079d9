from __future__ import annotations

from datetime import UTC, datetime

import pytest

from millstream.client.admin.position import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, Kind, Position, parse_position
from millstream.core.errors import InvalidRequest

NOW_MS = 1_800_000_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("start", Position(Kind.START)),
        ("Earliest", Position(Kind.START)),
        ("end", Position(Kind.END)),
        ("latest", Position(Kind.END)),
        ("0", Position(Kind.OFFSET, 0)),
        ("42", Position(Kind.OFFSET, 42)),
        ("90s", Position(Kind.TIME, NOW_MS - 90_000)),
        ("15m", Position(Kind.TIME, NOW_MS - 15 * 60_000)),
        ("7d", Position(Kind.TIME, NOW_MS - 7 * 86_400_000)),
        ("99999999w", Position(Kind.TIME, 0)),
        ("2026-01-31T12:00:00Z", Position(Kind.TIME, 1_769_860_800_000)),
        ("2026-01-31T13:00:00.5+01:00", Position(Kind.TIME, 1_769_860_800_500)),
    ],
)
def test_a_position_is_parsed(text: str, expected: Position) -> None:
    assert parse_position(text, now_ms=NOW_MS) == expected


def test_a_time_without_a_zone_is_local_time() -> None:
    local = datetime(2026, 1, 31, 12, 0).astimezone()
    assert parse_position("2026-01-31T12:00").value == int(local.astimezone(UTC).timestamp() * 1000)


@pytest.mark.parametrize("text", ["", "yesterday", "¹", "-5", "1.5", "12q", "2026-13-01"])
def test_an_invalid_position_is_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(InvalidRequest, match="start, end, an offset, a time"):
        parse_position(text)


def test_positions_are_looked_up_by_time_unless_they_are_offsets() -> None:
    assert Position(Kind.START).lookup_timestamp == EARLIEST_TIMESTAMP
    assert Position(Kind.END).lookup_timestamp == LATEST_TIMESTAMP
    assert Position(Kind.TIME, 7).lookup_timestamp == 7
    assert Position(Kind.OFFSET, 7).lookup_timestamp is None
