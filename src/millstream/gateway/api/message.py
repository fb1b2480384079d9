"""Stored messages as JSON documents, with the members that publishing accepts."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from millstream.client.admin.messages import decode_record, utc
from millstream.core.headers import CONTENT_TYPE
from millstream.core.ids import message_id
from millstream.protocol.records.record import Headers, Record

if TYPE_CHECKING:
    from millstream.protocol.wire.client import Client

Decode = Literal["schema"]
"""Forms of decoding, in addition to sending values as they are stored."""

_RAW = msgspec.json.Decoder(msgspec.Raw)
_CONTROLS = bytes(range(0x20))
_ESCAPED_BYTES = 6
"""The length of an escaped control character in JSON."""
_MEMBERS_BYTES = 1024
"""The approximate size of a document without key, value and headers."""


class ReceivedMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message. Its value is in `json` if the content type says so, otherwise in `value`, or in `base64` if it is not
    text.

    A null value sets none of them.
    """

    id: str
    topic: str
    partition: int
    offset: int
    timestamp: str | None
    key: str | None = None
    key_base64: str | None = None
    value: str | None = None
    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    base64: str | None = None
    headers: dict[str, str] = {}
    headers_base64: dict[str, str] = {}
    """Headers whose values are not text."""
    schema: str | None = None
    """With `decode=schema`: the id or GUID of the schema that the value names, if it could be decoded with it."""
    decoded: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """The value as that schema decodes it."""


class LeasedDocument(ReceivedMessage, frozen=True, kw_only=True, omit_defaults=True):
    """A message leased to the client that received it, until the deadline."""

    lease: str
    """The token that settles the message, at any node."""
    attempt: int
    deadline: str


def message_bytes(record: Record) -> int:
    """Return the size of a message's key, value and headers."""
    headers = sum(len(name) + len(value or b"") for name, value in record.headers)
    return len(record.key or b"") + len(record.value or b"") + headers


def document_bytes(record: Record) -> int:
    """Return the largest possible size of a message as JSON: control characters are escaped, binary values encoded."""
    contents = [record.key, record.value, *(value for _, value in record.headers)]
    names = sum(_ESCAPED_BYTES * len(name) for name, _ in record.headers)
    return _MEMBERS_BYTES + names + sum(_json_bytes(content) for content in contents if content)


def held_bytes(record: Record) -> int:
    """Return the memory that a message takes until it is sent: its contents as bytes and text, and its document
    twice.
    """
    return 2 * (message_bytes(record) + document_bytes(record))


def _json_bytes(content: bytes) -> int:
    controls = len(content) - len(content.translate(None, _CONTROLS))
    quoted = content.count(b'"') + content.count(b"\\")
    return max(len(content) + (_ESCAPED_BYTES - 1) * controls + quoted, 4 * len(content) // 3 + 4)


def members_of(topic: str, topic_id: object, partition: int, record: Record) -> dict[str, Any]:
    members: dict[str, Any] = {
        "id": message_id(topic_id, partition, record.offset, record.headers),
        "topic": topic,
        "partition": partition,
        "offset": record.offset,
        "timestamp": utc(record.timestamp_ms),
    }
    if record.key is not None:
        _set(members, "key", "key_base64", record.key)
    if record.value is not None:
        _set(members, "value", "base64", record.value)
        if "value" in members and declares_json(record.headers):
            _as_json(members, record.value)
    texts: dict[str, str] = {}
    others: dict[str, str] = {}
    for name, value in record.headers:
        try:
            texts[name] = (value or b"").decode()
        except UnicodeDecodeError:
            others[name] = base64.b64encode(value or b"").decode()
    if texts:
        members["headers"] = texts
    if others:
        members["headers_base64"] = others
    return members


async def decoded_members(client: Client, decode: Decode | None, topic: str, record: Record) -> dict[str, Any]:
    """Return the additional members of a document whose value is requested by schema and decodes."""
    decoded = await decode_record(client, topic, record) if decode else None
    return {} if decoded is None else {"schema": decoded.named, "decoded": msgspec.Raw(decoded.value)}


def decoded_bytes(members: Mapping[str, Any]) -> int:
    """Return the memory that a decoded value takes until it is sent."""
    return 2 * len(members.get("decoded", b""))


def received(topic: str, topic_id: object, partition: int, record: Record, **more: Any) -> ReceivedMessage:
    return ReceivedMessage(**members_of(topic, topic_id, partition, record), **more)


def in_one_line(document: bytes) -> bytes:
    """Remove line ends, which published JSON may contain."""
    return msgspec.json.format(document, indent=-1) if b"\n" in document or b"\r" in document else document


def _set(members: dict[str, Any], text: str, encoded: str, value: bytes) -> None:
    try:
        members[text] = value.decode()
    except UnicodeDecodeError:
        members[encoded] = base64.b64encode(value).decode()


def declares_json(headers: Headers) -> bool:
    for name, value in headers:
        if name == CONTENT_TYPE and value is not None:
            return is_json(value.decode("latin-1"))
    return False


def is_json(content_type: str) -> bool:
    """Return whether a content type is JSON, by its name or its suffix."""
    return content_type.partition(";")[0].strip().lower().endswith(("/json", "+json"))


def _as_json(members: dict[str, Any], value: bytes) -> None:
    try:
        members["json"] = _RAW.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return
    del members["value"]
