"""Messages as they arrive over HTTP: a body with headers, an element of a JSON batch, or a CloudEvent."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Mapping
from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import Meta

from millstream.core.headers import (
    BAGGAGE,
    CONTENT_TYPE,
    CORRELATION_ID,
    DELIVER_AT,
    MESSAGE_ID,
    TRACEPARENT,
    TRACESTATE,
)
from millstream.core.json_problem import plain_problem
from millstream.gateway.api.message import declares_json, is_json
from millstream.gateway.api.problem import Refused, invalid
from millstream.protocol.records.record import NewRecord

BATCH_MAX: Final = 1000
ID_LENGTH_MAX: Final = 1024
DELAY_S_MAX: Final = 366 * 24 * 3600

_DEFAULT_CONTENT_TYPES: Final = frozenset({"application/x-www-form-urlencoded", "application/octet-stream"})
"""Content types that HTTP clients send by default, which say nothing about the message."""

_raw_decoder: Final = msgspec.json.Decoder(msgspec.Raw)
_PREFIX: Final = b"message-"
_HEADER_PREFIX: Final = b"message-header-"

Text = Annotated[str, Meta(max_length=ID_LENGTH_MAX)]
Id = Annotated[str, Meta(min_length=1, max_length=ID_LENGTH_MAX)]
PartitionNumber = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Delay = Annotated[float, Meta(ge=0, le=DELAY_S_MAX)]


class MessageHeaders(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """Request headers that describe the message in the body."""

    message_key: Annotated[
        str | None, Meta(description="Messages with the same key go to the same partition, in order.")
    ] = None
    message_id: Annotated[Id | None, Meta(description="The message id. Default: topic id, partition and offset.")] = (
        None
    )
    message_partition: Annotated[
        PartitionNumber | None, Meta(description="The partition, instead of the one that the key selects.")
    ] = None
    message_deliver_at: Annotated[
        str | None,
        Meta(description="Subscriptions deliver the message no earlier: RFC 3339, or milliseconds since 1970."),
    ] = None
    message_delay: Annotated[
        Delay | None, Meta(description="Subscriptions deliver the message after this many seconds.")
    ] = None
    correlation_id: Annotated[str | None, Meta(description="Stored with the message.")] = None
    traceparent: Annotated[str | None, Meta(description="W3C trace context, stored with the message.")] = None
    tracestate: Annotated[str | None, Meta(description="W3C trace context, stored with the message.")] = None
    baggage: Annotated[str | None, Meta(description="W3C baggage, stored with the message.")] = None


class NewMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message of a JSON batch, with at most one of `value`, `json` and `base64`; without any, its value is null."""

    value: str | None = None
    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    base64: str | None = None
    key: str | None = None
    key_base64: str | None = None
    id: Id | None = None
    headers: dict[str, str] = {}
    partition: PartitionNumber | None = None
    deliver_at: str | None = None
    delay: Delay | None = None
    correlation_id: Text | None = None


class MessageBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Messages that are published together, in this order; each is acknowledged."""

    messages: Annotated[list[NewMessage], Meta(min_length=1, max_length=BATCH_MAX)]


class RecordToPublish(NamedTuple):
    """A record to store, and its partition if one was given."""

    record: NewRecord
    partition: int | None
    id: bytes | None


_OF_REQUEST: Final = (CORRELATION_ID, TRACEPARENT, TRACESTATE, BAGGAGE)
"""Request headers that are stored with every message of the request."""

_KNOWN: Final = {field.encode_name.encode() for field in msgspec.structs.fields(MessageHeaders)}


def from_request(headers: Mapping[bytes, bytes], body: bytes) -> RecordToPublish:
    """Read the message of a request whose body is the value."""
    key = message_id = None
    partition: int | None = None
    due_ms: int | None = None
    stored: list[tuple[str, bytes | None]] = []
    for name, value in headers.items():
        if name == b"content-type":
            if value.decode("latin-1").partition(";")[0].strip().lower() not in _DEFAULT_CONTENT_TYPES:
                stored.append((CONTENT_TYPE, value))
        elif name.startswith(_PREFIX):
            if name == b"message-key":
                key = value
            elif name == b"message-id":
                message_id = _checked_id(value)
                stored.append((MESSAGE_ID, value))
            elif name.startswith(_HEADER_PREFIX) and len(name) > len(_HEADER_PREFIX):
                stored.append((name[len(_HEADER_PREFIX) :].decode("latin-1"), value))
            elif name == b"message-partition":
                partition = _partition(value)
            elif name in (b"message-deliver-at", b"message-delay"):
                if due_ms is not None:
                    raise invalid("send Message-Delay or Message-Deliver-At, not both")
                is_time = name == b"message-deliver-at"
                due_ms = _time_ms(value.decode("latin-1")) if is_time else _after_ms(_delay(value))
            else:
                raise invalid(
                    f"header {name.decode('latin-1')!r} is unknown; start headers of your own with Message-Header-"
                )
        elif name in _KNOWN:
            stored.append((name.decode(), value))
    if due_ms is not None:
        stored.append((DELIVER_AT, b"%d" % due_ms))
    return _checked_json(RecordToPublish(NewRecord(key, body, tuple(stored)), partition, message_id))


def from_batch(message: NewMessage) -> RecordToPublish:
    stored: list[tuple[str, bytes | None]] = []
    if message.json is not msgspec.UNSET:
        stored.append((CONTENT_TYPE, b"application/json"))
    if message.id is not None:
        stored.append((MESSAGE_ID, message.id.encode()))
    if message.correlation_id is not None:
        stored.append((CORRELATION_ID, message.correlation_id.encode()))
    if message.deliver_at is not None or message.delay is not None:
        if message.deliver_at is not None and message.delay is not None:
            raise invalid("set `delay` or `deliver_at`, not both")
        due_ms = _time_ms(message.deliver_at) if message.deliver_at is not None else _after_ms(message.delay or 0)
        stored.append((DELIVER_AT, b"%d" % due_ms))
    if message.headers:
        known = {name for name, _ in stored}
        stored += [(name, value.encode()) for name, value in message.headers.items() if name not in known]
    message_id = None if message.id is None else message.id.encode()
    record = NewRecord(_key(message), _value(message), tuple(stored))
    return _checked_json(RecordToPublish(record, message.partition, message_id))


def _checked_json(placed: RecordToPublish) -> RecordToPublish:
    """Return a message; refuse one that is declared as JSON and is not: every reader of it would fail."""
    value = placed.record.value
    if value is not None and declares_json(placed.record.headers):
        try:
            _raw_decoder.decode(value)
            # The decoder does not look into strings.
            value.decode()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            detail = f"the message is declared as JSON and is not JSON: {error}"
            raise Refused(HTTPStatus.BAD_REQUEST, detail) from None
    return placed


def with_request(placed: RecordToPublish, headers: Mapping[bytes, bytes]) -> RecordToPublish:
    """Add the request's headers to a message of a batch, unless the message sets them itself."""
    own = {name for name, _ in placed.record.headers}
    shared = [(name, value) for name in _OF_REQUEST if name not in own and (value := headers.get(name.encode()))]
    if not shared:
        return placed
    return placed._replace(record=placed.record._replace(headers=(*placed.record.headers, *shared)))


def _key(message: NewMessage) -> bytes | None:
    if message.key_base64 is not None:
        if message.key is not None:
            raise invalid("set `key` or `key_base64`, not both")
        return from_base64(message.key_base64, "key_base64")
    return None if message.key is None else message.key.encode()


def _value(message: NewMessage) -> bytes | None:
    count = (message.value is not None) + (message.json is not msgspec.UNSET) + (message.base64 is not None)
    if count > 1:
        raise invalid("set one of `value`, `json` and `base64`")
    if message.value is not None:
        return message.value.encode()
    if message.base64 is not None:
        return from_base64(message.base64, "base64")
    return None if isinstance(message.json, msgspec.UnsetType) else bytes(message.json)


def from_base64(text: str, name: str) -> bytes:
    """Decode base64; raise `Refused` that names the member."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise invalid(f"{name} is not valid base64") from None


def _checked_id(value: bytes) -> bytes:
    if not 0 < len(value) <= ID_LENGTH_MAX:
        raise invalid(f"a message id has 1 to {ID_LENGTH_MAX} bytes")
    return value


def _partition(value: bytes) -> int:
    if not value.isdigit() or len(value) > 9:
        raise invalid(f"Message-Partition must be a number, not {value.decode('latin-1')!r}")
    return int(value)


def _delay(value: bytes) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1
    if not 0 <= seconds <= DELAY_S_MAX:
        raise invalid(f"Message-Delay must be 0 to {DELAY_S_MAX} seconds, not {value.decode('latin-1')!r}")
    return seconds


def _after_ms(seconds: float) -> int:
    return int((time.time() + seconds) * 1000)


def _time_ms(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 15:
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise invalid(f"{text!r} is not a time; write it as 2026-01-31T12:00:00Z, or as milliseconds since 1970")
    return max(0, int(moment.timestamp() * 1000))


STRUCTURED: Final = "application/cloudevents+json"
BATCHED: Final = "application/cloudevents-batch+json"
SPEC_HEADER: Final = b"ce-specversion"
SPEC_VERSION: Final = "1.0"
_ATTRIBUTE_PREFIX: Final = b"ce-"
_STORED_PREFIX: Final = "ce_"
_REQUIRED: Final = ("specversion", "id", "source", "type")
_DATA: Final = frozenset({"data", "data_base64", "datacontenttype"})
_NAME_LENGTH_MAX: Final = 64

Attribute = Annotated[str, Meta(min_length=1, max_length=4096)]


# Attributes become headers `ce_…`, the data is the message's value, `partitionkey` its key, and the event's id is the
# message id: events from several sources in one topic need ids that differ.
class CloudEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event in JSON. Other attributes are extensions: strings, numbers or booleans."""

    specversion: Annotated[str, Meta(pattern="^1\\.0$")]
    id: Id
    source: Attribute
    type: Attribute
    subject: Attribute | None = None
    time: Attribute | None = None
    dataschema: Attribute | None = None
    datacontenttype: Attribute | None = None
    partitionkey: Attribute | None = None
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    data_base64: str | None = None


CloudEvents = Annotated[list[CloudEvent], Meta(min_length=1, max_length=BATCH_MAX)]
"""Events that are published together."""

_KNOWN_ATTRIBUTES: Final = frozenset(field.encode_name for field in msgspec.structs.fields(CloudEvent))
_Members = dict[str, msgspec.Raw]
structured_decoder: Final = msgspec.json.Decoder(_Members)
batch_decoder: Final = msgspec.json.Decoder(Annotated[list[_Members], Meta(min_length=1, max_length=BATCH_MAX)])


def from_headers(headers: Mapping[bytes, bytes], placed: RecordToPublish) -> RecordToPublish:
    """Read an event in binary mode: the message of the request, with the event's attributes."""
    attributes = {
        name[len(_ATTRIBUTE_PREFIX) :].decode("latin-1"): unquote_to_bytes(value)
        for name, value in headers.items()
        if name.startswith(_ATTRIBUTE_PREFIX)
    }
    for name in _REQUIRED:
        if not attributes.get(name):
            raise invalid(f"the header ce-{name} is missing; an event needs it")
    if attributes["specversion"] != SPEC_VERSION.encode():
        raise invalid(f"CloudEvents {SPEC_VERSION} is supported, not {attributes['specversion'].decode('latin-1')!r}")
    return _with_attributes(placed, attributes)


def from_members(members: _Members) -> RecordToPublish:
    """Read an event in structured mode."""
    event = _checked(members)
    attributes: dict[str, bytes] = {"specversion": event.specversion.encode()}
    for name, raw in members.items():
        if name not in _DATA and name != "specversion":
            value = _attribute(name, raw)
            if value is not None:
                attributes[name] = value
    content_type = event.datacontenttype
    if content_type is None and not isinstance(event.data, msgspec.UnsetType):
        content_type = "application/json"
    stored: tuple[tuple[str, bytes | None], ...] = ()
    if content_type is not None:
        stored = ((CONTENT_TYPE, content_type.encode()),)
    placed = _checked_json(RecordToPublish(NewRecord(None, _data(event, content_type), stored), None, None))
    return _with_attributes(placed, attributes)


def _checked(members: _Members) -> CloudEvent:
    known = {name: raw for name, raw in members.items() if name in _KNOWN_ATTRIBUTES}
    try:
        return msgspec.json.decode(msgspec.json.encode(known), type=CloudEvent)
    except msgspec.ValidationError as error:
        raise invalid(f"the event is invalid: {plain_problem(error)}") from None


def _attribute(name: str, raw: msgspec.Raw) -> bytes | None:
    if not (name.isascii() and name.isalnum() and name == name.lower() and len(name) <= _NAME_LENGTH_MAX):
        raise invalid(f"{name!r} cannot be an event attribute; use lower-case letters and digits")
    value: Any = msgspec.json.decode(raw)
    if value is None:
        return None
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if not isinstance(value, str | int):
        raise invalid(f"the event attribute {name!r} must be a string, a number or a boolean")
    return str(value).encode()


def _data(event: CloudEvent, content_type: str | None) -> bytes | None:
    if event.data_base64 is not None:
        if not isinstance(event.data, msgspec.UnsetType):
            raise invalid("an event has `data` or `data_base64`, not both")
        return from_base64(event.data_base64, "data_base64")
    if isinstance(event.data, msgspec.UnsetType):
        return None
    raw = bytes(event.data)
    if raw.startswith(b'"') and not is_json(content_type or ""):
        # A string of a type other than JSON is the string itself.
        text: str = msgspec.json.decode(raw)
        return text.encode()
    return raw


def _with_attributes(placed: RecordToPublish, attributes: Mapping[str, bytes]) -> RecordToPublish:
    record = placed.record
    key = record.key if record.key is not None else attributes.get("partitionkey")
    message_id = placed.id if placed.id is not None else attributes["id"]
    headers = [*record.headers, *((_STORED_PREFIX + name, value) for name, value in attributes.items())]
    if placed.id is None:
        headers.append((MESSAGE_ID, message_id))
    return RecordToPublish(record._replace(key=key, headers=tuple(headers)), placed.partition, message_id)
