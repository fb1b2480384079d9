"""One message as it is shown: for people, for programs, or its bytes alone."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from typing import Any

from millstream.cli.message_id import message_id
from millstream.cli.output import one_line
from millstream.records.record import Record

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def as_document(topic: str, topic_id: object, partition: int, record: Record) -> dict[str, Any]:
    """The message for programs. Bytes that are not UTF-8 come as `{"base64": …}`."""
    return {
        "topic": topic,
        "partition": partition,
        "offset": record.offset,
        "id": message_id(topic_id, partition, record.offset, record.headers),
        "timestamp": _utc(record.timestamp_ms),
        "timestamp_ms": record.timestamp_ms,
        "key": _as_json(record.key),
        "value": _as_json(record.value),
        "headers": [[name, _as_json(value)] for name, value in record.headers],
    }


def as_text(topic: str, partition: int, record: Record, *, colour: bool) -> str:
    """The message for people: a line about it, then its value; JSON is laid out to be read."""
    facts = [f"{topic}/{partition}@{record.offset}", local_time(record.timestamp_ms)]
    if record.key is not None:
        facts.append(f"key={readable(record.key)}")
    facts += [f"{one_line(name)}={readable(value)}" for name, value in record.headers]
    head = "  ".join(facts)
    value = readable_value(record.value)
    return f"{_DIM}{head}{_PLAIN}\n{value}" if colour else f"{head}\n{value}"


def readable_value(value: bytes | None) -> str:
    """A value for people; JSON is laid out to be read."""
    if value is None:
        return "(null)"
    if value[:1] in (b"{", b"["):
        try:
            return harmless(json.dumps(json.loads(value), indent=2, ensure_ascii=False))
        except ValueError:
            pass
    return readable(value)


def readable(value: bytes | None) -> str:
    """Bytes for people."""
    return "(null)" if value is None else harmless(value.decode(errors="backslashreplace"))


def harmless(text: str) -> str:
    """A text from elsewhere, which must not be able to move the cursor or change the terminal of whoever reads it."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def _as_json(value: bytes | None) -> Any:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def _utc(timestamp_ms: int) -> str | None:
    moment = _moment(timestamp_ms)
    return None if moment is None else moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def local_time(timestamp_ms: int) -> str:
    """A message's time for people, where they are."""
    moment = _moment(timestamp_ms)
    if moment is None:
        return "no time"
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S}.{timestamp_ms % 1000:03d}"


def _moment(timestamp_ms: int) -> datetime | None:
    if timestamp_ms < 0:
        return None
    try:
        return datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return None
