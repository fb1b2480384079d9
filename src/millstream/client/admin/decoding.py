"""Stored records as their schemas decode them, for people who look at them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.core.errors import MillstreamError
from millstream.protocol.records.record import Record

if TYPE_CHECKING:
    from millstream.protocol.wire.client import Client


class DecodedRecord(NamedTuple):
    """The value of a record as JSON, and the schema that it names."""

    named: str
    """An id or a guid."""
    value: bytes

    def document(self) -> dict[str, Any]:
        """Return what is added to the JSON document of a message."""
        return {"schema": self.named, "decoded": json.loads(self.value)}


async def decode_record(client: Client, topic: str, record: Record) -> DecodedRecord | None:
    """Decode the value of a record; None if it names no schema, one that is unknown, or does not fit it."""
    if record.value is None:
        return None
    # Loaded when it is needed: most topics have no schemas.
    from millstream.protocol.schemas.framing import ID_MAGIC, VALUE_HEADER, schema_header, unframe

    if record.value[:1] != bytes([ID_MAGIC]) and all(name != VALUE_HEADER for name, _ in record.headers):
        return None
    from millstream.client.schemas import codecs_of
    from millstream.protocol.schemas.codec import to_json

    try:
        framed = unframe(record.value, schema_header(record.headers, "value"))
        found = await codecs_of(client).named(framed, f"{topic}-value")
        return DecodedRecord(str(found.schema.id or found.schema.guid), to_json(found.codec.decode(framed)))
    except MillstreamError:
        return None
