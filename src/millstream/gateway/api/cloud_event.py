"""CloudEvents over HTTP in binary, structured and batched mode, stored as CloudEvents' Kafka binding prescribes.

Attributes become headers `ce_…`, the data is the message's value, `partitionkey` its key, and the event's id is the
message id: events from several sources in one topic need ids that differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import Meta

from millstream.gateway.api.new_message import BATCH_MAX, CONTENT_TYPE, MESSAGE_ID, Id, Placed, from_base64
from millstream.gateway.api.problem import invalid
from millstream.protocol.records.record import NewRecord

STRUCTURED: Final = "application/cloudevents+json"
BATCHED: Final = "application/cloudevents-batch+json"
SPEC_HEADER: Final = b"ce-specversion"
VERSION: Final = "1.0"
_PREFIX: Final = b"ce-"
_STORED_PREFIX: Final = "ce_"
_REQUIRED: Final = ("specversion", "id", "source", "type")
_DATA: Final = frozenset({"data", "data_base64", "datacontenttype"})
_NAME_LENGTH_MAX: Final = 64

Attribute = Annotated[str, Meta(min_length=1, max_length=4096)]


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

_KNOWN: Final = frozenset(field.encode_name for field in msgspec.structs.fields(CloudEvent))
_Members = dict[str, msgspec.Raw]
structured_decoder: Final = msgspec.json.Decoder(_Members)
batch_decoder: Final = msgspec.json.Decoder(Annotated[list[_Members], Meta(min_length=1, max_length=BATCH_MAX)])


def from_headers(headers: Mapping[bytes, bytes], placed: Placed) -> Placed:
    """Read an event in binary mode: the message of the request, with the event's attributes."""
    attributes = {
        name[len(_PREFIX) :].decode("latin-1"): unquote_to_bytes(value)
        for name, value in headers.items()
        if name.startswith(_PREFIX)
    }
    for name in _REQUIRED:
        if not attributes.get(name):
            raise invalid(f"the header ce-{name} is missing; an event needs it")
    if attributes["specversion"] != VERSION.encode():
        raise invalid(f"CloudEvents {VERSION} is supported, not {attributes['specversion'].decode('latin-1')!r}")
    return _with_attributes(placed, attributes)


def from_members(members: _Members) -> Placed:
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
    return _with_attributes(Placed(NewRecord(None, _data(event, content_type), stored), None, None), attributes)


def _checked(members: _Members) -> CloudEvent:
    known = {name: raw for name, raw in members.items() if name in _KNOWN}
    try:
        return msgspec.json.decode(msgspec.json.encode(known), type=CloudEvent)
    except msgspec.ValidationError as error:
        raise invalid(f"the event is invalid: {error}") from None


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
    if raw.startswith(b'"') and not _is_json(content_type or ""):
        # A string of a type other than JSON is the string itself.
        text: str = msgspec.json.decode(raw)
        return text.encode()
    return raw


def _is_json(content_type: str) -> bool:
    media = content_type.partition(";")[0].strip().lower()
    return media.endswith(("/json", "+json"))


def _with_attributes(placed: Placed, attributes: Mapping[str, bytes]) -> Placed:
    record = placed.record
    key = record.key if record.key is not None else attributes.get("partitionkey")
    message_id = placed.id if placed.id is not None else attributes["id"]
    headers = [*record.headers, *((_STORED_PREFIX + name, value) for name, value in attributes.items())]
    if placed.id is None:
        headers.append((MESSAGE_ID, message_id))
    return Placed(record._replace(key=key, headers=tuple(headers)), placed.partition, message_id)
