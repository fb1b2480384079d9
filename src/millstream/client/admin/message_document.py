"""One message as programs are shown it."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from millstream.core.message_id import message_id
from millstream.protocol.records.record import Record


def as_document(topic: str, topic_id: object, partition: int, record: Record) -> dict[str, Any]:
    """The message for programs. Bytes that are not UTF-8 come as `{"base64": …}`."""
    return {
        "topic": topic,
        "partition": partition,
        "offset": record.offset,
        "id": message_id(topic_id, partition, record.offset, record.headers),
        "timestamp": utc(record.timestamp_ms),
        "timestamp_ms": record.timestamp_ms,
        "key": _as_json(record.key),
        "value": _as_json(record.value),
        "headers": [[name, _as_json(value)] for name, value in record.headers],
    }


def moment_of(timestamp_ms: int) -> datetime | None:
    """A message's time; None where it has none, or one that no calendar has."""
    if timestamp_ms < 0:
        return None
    try:
        return datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return None


def _as_json(value: bytes | None) -> Any:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


# Messages that are published together have few times between them.
@lru_cache(maxsize=1024)
def utc(timestamp_ms: int) -> str | None:
    """A message's time as RFC 3339 has it."""
    moment = moment_of(timestamp_ms)
    return None if moment is None else moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
