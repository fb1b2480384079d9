"""Messages as readable text."""

from __future__ import annotations

import json
import re
from typing import Final

import msgspec

from millstream.cli.output import local_time, one_line
from millstream.client.admin.messages import DecodedRecord
from millstream.protocol.records.record import Record

_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
"""A string in JSON."""

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def as_text(
    topic: str, partition: int, record: Record, *, colour: bool, indent: bool, decoded: DecodedRecord | None = None
) -> str:
    """Return a message as text: a line about it, then its value, as its schema decodes it."""
    facts = [f"{topic}/{partition}@{record.offset}", local_time(record.timestamp_ms)]
    if record.key is not None:
        facts.append(f"key={readable(record.key)}")
    facts += [f"{one_line(name)}={readable(value)}" for name, value in record.headers]
    if decoded is not None:
        facts.append(f"schema={decoded.named}")
    head = "  ".join(facts)
    value = readable_value(record.value if decoded is None else decoded.value, indent=indent)
    return f"{_DIM}{head}{_PLAIN}\n{value}" if colour else f"{head}\n{value}"


def readable_value(value: bytes | None, *, indent: bool = True) -> str:
    """Return a value as text; JSON is indented, or on one line."""
    if value is None:
        return "(null)"
    if value[:1] in (b"{", b"["):
        try:
            # Numbers stay as they were published: as floats, they would lose digits.
            document = msgspec.json.format(value, indent=2 if indent else 0).decode()
            return escape_controls(_STRING.sub(_unescaped, document))
        except (msgspec.DecodeError, ValueError, RecursionError):
            pass
    return readable(value)


def _unescaped(text: re.Match[str]) -> str:
    return json.dumps(json.loads(text[0]), ensure_ascii=False)


def readable(value: bytes | None) -> str:
    return "(null)" if value is None else escape_controls(value.decode(errors="backslashreplace"))


def escape_controls(text: str) -> str:
    """Escape control characters, which could move the cursor or change the reader's terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
