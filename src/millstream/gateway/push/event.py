"""Messages as HTTP requests: a CloudEvent in binary or structured mode, or the raw message.

Headers `ce_…`, as in CloudEvents' Kafka binding, are the event's attributes; missing ones are filled in. The message's
position and attempt are extension attributes.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any, Final, NamedTuple
from urllib.parse import quote_from_bytes

import msgspec

from millstream.client.admin.messages import utc
from millstream.core.headers import CONTENT_TYPE, CORRELATION_ID, MESSAGE_ID, TRACEPARENT, TRACESTATE
from millstream.core.push import BINARY, RAW
from millstream.gateway.api.message import is_json
from millstream.protocol.private.subscriptions import LeasedMessage

STRUCTURED_TYPE: Final = b"application/cloudevents+json; charset=utf-8"
DEFAULT_TYPE: Final = "millstream.message"

_STORED: Final = "ce_"
_JSON: Final = "application/json"
_BYTES: Final = "application/octet-stream"
# Characters that CloudEvents headers hold unescaped; all others are percent-encoded.
_PLAIN: Final = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')
_NAME_SAFE: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")

Headers = list[tuple[bytes, bytes]]


class Content(NamedTuple):
    """The request of a message: its id for the header, further headers, and the body."""

    message_id: bytes
    headers: Headers
    body: bytes


def content_of(message: LeasedMessage, layout: str) -> Content:
    headers = _by_name(message.record.headers)
    message_id = _id_of(message, headers)
    if layout == RAW:
        return Content(_quoted(message_id), _raw(message, headers, message_id), message.record.value or b"")
    value = message.record.value or b""
    kind = _content_type(headers, value)
    attributes = _attributes(message, headers, message_id)
    if layout == BINARY:
        lines = [(f"ce-{name}".encode(), _quoted(text.encode())) for name, text in attributes.items()]
        lines.append((CONTENT_TYPE.encode(), _header_value(kind.encode())))
        return Content(_quoted(message_id), lines + _trace(headers), value)
    document: dict[str, Any] = {**attributes, "datacontenttype": kind, **_data(kind, message.record.value)}
    body = msgspec.json.encode(document)
    return Content(_quoted(message_id), [(CONTENT_TYPE.encode(), STRUCTURED_TYPE), *_trace(headers)], body)


def _attributes(message: LeasedMessage, headers: dict[str, bytes], message_id: bytes) -> dict[str, str]:
    """Return the event's attributes, its own first."""
    record = message.record
    attributes = {
        name: _text(headers[_STORED + name])
        for name in (header.removeprefix(_STORED) for header in headers if header.startswith(_STORED))
        if name.isascii() and name.isalnum() and name == name.lower()
    }
    attributes.pop("datacontenttype", None)
    made = {
        "specversion": "1.0",
        "id": _text(message_id),
        "source": f"/topics/{message.topic}",
        "type": DEFAULT_TYPE,
        "time": utc(record.timestamp_ms) or "",
        "subject": "" if record.key is None else _text(record.key),
        "correlationid": _text(headers.get(CORRELATION_ID, b"")),
        "traceparent": _text(headers.get(TRACEPARENT, b"")),
    }
    for name, text in made.items():
        if text and not attributes.get(name):
            attributes[name] = text
    attributes["specversion"] = "1.0"
    attributes.update(
        topic=message.topic,
        partition=str(message.partition),
        offset=str(record.offset),
        attempt=str(message.attempt),
    )
    return {name: text for name, text in attributes.items() if text}


def _raw(message: LeasedMessage, headers: dict[str, bytes], message_id: bytes) -> Headers:
    record = message.record
    lines = [
        (b"message-id", _quoted(message_id)),
        (b"message-topic", message.topic.encode()),
        (b"message-partition", b"%d" % message.partition),
        (b"message-offset", b"%d" % record.offset),
        (b"message-attempt", b"%d" % message.attempt),
        (b"message-time", (utc(record.timestamp_ms) or "").encode()),
        (CONTENT_TYPE.encode(), _header_value(_content_type(headers, record.value or b"").encode())),
    ]
    if record.key is not None:
        lines.append((b"message-key", _quoted(record.key)))
    kept = (CONTENT_TYPE, MESSAGE_ID, CORRELATION_ID, TRACEPARENT, TRACESTATE)
    lines += [
        (b"message-header-" + name.encode(), _quoted(value))
        for name, value in headers.items()
        if name not in kept and set(name) <= _NAME_SAFE
    ]
    if CORRELATION_ID in headers:
        lines.append((CORRELATION_ID.encode(), _quoted(headers[CORRELATION_ID])))
    return lines + _trace(headers)


def _data(kind: str, value: bytes | None) -> dict[str, Any]:
    if value is None:
        return {}
    if is_json(kind) and _is_document(value):
        return {"data": msgspec.Raw(value)}
    if kind.startswith("text/"):
        try:
            return {"data": value.decode()}
        except UnicodeDecodeError:
            pass
    return {"data_base64": base64.b64encode(value).decode()}


def _content_type(headers: dict[str, bytes], value: bytes) -> str:
    """Return the declared content type, or one that the value suggests."""
    declared = headers.get(CONTENT_TYPE) or headers.get("ce_datacontenttype")
    if declared:
        return _text(declared)
    return _JSON if _is_document(value) else _BYTES


def _is_document(value: bytes) -> bool:
    try:
        # Strings within the document have to be valid text too, or it could not be parsed.
        value.decode()
        msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _id_of(message: LeasedMessage, headers: dict[str, bytes]) -> bytes:
    message_id = headers.get(MESSAGE_ID) or headers.get("ce_id")
    return message_id or f"{message.topic_id}/{message.partition}/{message.record.offset}".encode()


def _trace(headers: dict[str, bytes]) -> Headers:
    return [(name.encode(), _header_value(headers[name])) for name in (TRACEPARENT, TRACESTATE) if headers.get(name)]


def _by_name(headers: Iterable[tuple[str, bytes | None]]) -> dict[str, bytes]:
    """Map headers by name; the first of several with the same name wins, as everywhere here."""
    values: dict[str, bytes] = {}
    for name, value in headers:
        values.setdefault(name, value or b"")
    return values


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _quoted(value: bytes) -> bytes:
    return quote_from_bytes(value, safe=_PLAIN).encode()


def _header_value(value: bytes) -> bytes:
    """Remove what a header cannot hold."""
    return bytes(code for code in value if 0x20 <= code < 0x7F)
