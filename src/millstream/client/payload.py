"""Encodes the payloads that programs publish: JSON, text or bytes, with a header that names the type."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast

import msgspec

from millstream.core.errors import InvalidRequest
from millstream.core.headers import CONTENT_TYPE, DELIVER_AT, MESSAGE_ID
from millstream.protocol.records.record import Headers

_JSON: Final[Headers] = ((CONTENT_TYPE, b"application/json"),)
_TEXT: Final[Headers] = ((CONTENT_TYPE, b"text/plain; charset=utf-8"),)

Delay = float | timedelta | datetime
HeaderValue = str | bytes | None
GivenHeaders = Mapping[str, HeaderValue] | Sequence[tuple[str, HeaderValue]]

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message for `publish_many`, with everything that `publish` takes."""

    value: Any = None
    _: KW_ONLY
    key: str | bytes | None = None
    headers: GivenHeaders = ()
    id: str | None = None
    delay: Delay | None = None
    correlation_id: str | None = None
    schema: str | None = None


def encoded(value: Any) -> tuple[bytes | None, Headers]:
    """Return the encoded value, and the header with its content type.

    Bytes stay as they are; None stores no value, which deletes the key in a compacted topic; a string becomes UTF-8;
    everything else JSON, including dataclasses, times and `msgspec.Struct`. Numbers that JSON cannot represent are
    rejected.
    """
    if isinstance(value, bytes) or value is None:
        return value, ()
    if isinstance(value, str):
        return value.encode(), _TEXT
    if isinstance(value, bytearray | memoryview):
        return bytes(value), ()
    try:
        content = _encode(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"this {type(value).__name__} cannot be published as JSON: {error}") from error
    # The encoder writes null for NaN and infinities, so search for them only if the output contains null.
    if b"null" in content and not _is_finite(msgspec.to_builtins(value)):
        raise InvalidRequest(
            f"this {type(value).__name__} cannot be published as JSON, which has no NaN and no infinity; "
            "use None instead"
        )
    return content, _JSON


def key_bytes(key: str | bytes | None) -> bytes | None:
    if key is None or isinstance(key, bytes):
        return key
    if isinstance(key, str):
        return key.encode()
    raise InvalidRequest(f"key must be a string or bytes, not {type(key).__name__}")


def headers_of(
    own_headers: GivenHeaders, content: Headers, message_id: str | None = None, delay: Delay | None = None
) -> Headers:
    """Return the headers of a message: the given ones, and those for its type, id and delay."""
    if not own_headers and message_id is None and delay is None:
        return content
    pairs = own_headers.items() if isinstance(own_headers, Mapping) else _pairs(own_headers)
    headers: list[tuple[str, bytes | None]] = [(name, _header(name, value)) for name, value in pairs]
    names = {name for name, _ in headers}
    if CONTENT_TYPE not in names:
        headers += content
    if message_id is not None:
        if not isinstance(message_id, str) or not message_id:
            raise InvalidRequest(f"id must be a non-empty string, not {message_id!r}")
        if MESSAGE_ID in names:
            raise InvalidRequest(f"a message has one id: pass either id=… or the header {MESSAGE_ID!r}")
        headers.append((MESSAGE_ID, message_id.encode()))
    if delay is not None:
        headers.append((DELIVER_AT, str(due_ms(delay)).encode()))
    return tuple(headers)


def due_ms(delay: Delay, now: datetime | None = None) -> int:
    """Return when a delayed message is due, in milliseconds since 1970."""
    if isinstance(delay, datetime):
        if delay.tzinfo is None:
            raise InvalidRequest("delay: the time at which a message is due needs a time zone")
        moment = delay
    else:
        moment = _later(now or datetime.now(UTC), delay)
    return max(0, int(moment.timestamp() * 1000))


def _later(now: datetime, delay: float | timedelta) -> datetime:
    try:
        wait = delay if isinstance(delay, timedelta) else timedelta(seconds=delay)
        if wait >= timedelta(0):
            return now + wait
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidRequest(f"delay must be 0 or more seconds, a timedelta or a time, not {delay!r}")


def _is_finite(value: Any) -> bool:
    """Return whether JSON can represent every number in a value of plain lists and dictionaries."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite, value)) and all(map(_is_finite, value.values()))
    return not isinstance(value, list | tuple) or all(map(_is_finite, value))


def _pairs(headers: Any) -> Sequence[tuple[str, HeaderValue]]:
    is_sequence = isinstance(headers, Sequence) and not isinstance(headers, str | bytes)
    if not is_sequence or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in headers):
        raise InvalidRequest(f"headers must be a mapping of names to values, or pairs of them, not {headers!r}")
    return cast("Sequence[tuple[str, HeaderValue]]", headers)


def _header(name: str, value: HeaderValue) -> bytes | None:
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"headers must have non-empty strings as names, not {name!r}")
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    raise InvalidRequest(f"header {name!r} must be a string, bytes or None, not {value!r}")
