"""One message as it is shown: for people, for programs, or its bytes alone."""

from __future__ import annotations

import json

from millstream.cli.output import one_line
from millstream.client.admin.messages import moment_of
from millstream.protocol.records.record import Record

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


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


def local_time(timestamp_ms: int) -> str:
    """A message's time for people, where they are."""
    moment = moment_of(timestamp_ms)
    if moment is None:
        return "no time"
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S}.{timestamp_ms % 1000:03d}"
