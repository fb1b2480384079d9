"""Encodes and decodes messages by the schemas of the registry, which are fetched once and kept."""

from __future__ import annotations

import asyncio
import datetime
from collections import OrderedDict
from decimal import Decimal
from functools import cached_property
from typing import Any, Final
from uuid import UUID
from weakref import WeakKeyDictionary

import msgspec

from millstream.client.admin.schemas import SchemaClient
from millstream.core.errors import SchemaMismatch, SchemaRegistryError
from millstream.protocol.private.schema_messages import GetSchemaRequest, GetSubjectRequest, SchemaMessage
from millstream.protocol.records.record import Headers
from millstream.protocol.schemas.codec import Codec, codec_of
from millstream.protocol.schemas.framing import Framed, prefix, schema_header, unframe
from millstream.protocol.wire.client import Client

KEPT_MAX: Final = 1000
LATEST_S: Final = 30.0
"""How long the latest version of a subject, or an unknown id, is cached."""
_COMPILED: Final = "compiled"
_KEPT_TYPES: Final = (bytes, datetime.datetime, datetime.date, datetime.time, datetime.timedelta, Decimal, UUID)


class RegisteredCodec:
    """A schema, and its codec, which is made when it is first used."""

    def __init__(self, schema: SchemaMessage) -> None:
        self.schema = schema

    @cached_property
    def codec(self) -> Codec:
        return codec_of(self.schema.schema_type, self.schema.schema)


class SchemaCodecs:
    def __init__(self, client: Client) -> None:
        self._schemas = SchemaClient(client)
        self._by_name: OrderedDict[tuple[str, str], RegisteredCodec] = OrderedDict()
        """The codecs by schema id or guid, and by the subject that determines the context."""
        self._latest: OrderedDict[str, tuple[float, RegisteredCodec]] = OrderedDict()
        self._unknown: OrderedDict[tuple[str, str], tuple[float, SchemaRegistryError]] = OrderedDict()

    async def latest(self, subject: str) -> RegisteredCodec:
        """Return the latest version of a subject, cached for at most half a minute."""
        now = asyncio.get_running_loop().time()
        known = self._latest.get(subject)
        if known is not None and known[0] > now:
            return known[1]
        response = await self._schemas.subject(GetSubjectRequest(subject=subject, version="latest", format=_COMPILED))
        schema = _codec(response.schema)
        _cache(self._latest, subject, (now + LATEST_S, schema))
        return schema

    async def encode(self, subject: str, value: Any, *, is_json: bool = False) -> bytes:
        """Encode a value with the latest schema of a subject, with its id in front; a JSON document is converted."""
        schema = await self.latest(subject)
        try:
            if is_json:
                return prefix(schema.schema.id) + await self._encode_json(schema, value)
            converted = value if isinstance(value, dict) else msgspec.to_builtins(value, builtin_types=_KEPT_TYPES)
            return prefix(schema.schema.id) + schema.codec.encode(converted)
        except SchemaMismatch as error:
            raise SchemaMismatch(f"subject {subject!r}, version {schema.schema.version}: {error}") from error

    async def _encode_json(self, schema: RegisteredCodec, document: Any) -> bytes:
        return schema.codec.encode(schema.codec.from_json(document))

    async def decode_json(self, framed: Framed, subject: str) -> tuple[SchemaMessage, bytes]:
        """Return the schema that a value names, and the value as JSON."""
        schema = await self.named(framed, subject)
        return schema.schema, await self._decode_json(schema, framed)

    async def _decode_json(self, schema: RegisteredCodec, framed: Framed) -> bytes:
        return schema.codec.decode_json(framed)

    async def decode(self, topic: str, payload: bytes, headers: Headers = (), *, field: str = "value") -> Any:
        framed = unframe(payload, schema_header(headers, field))
        return (await self.named(framed, f"{topic}-{field}")).codec.decode(framed)

    async def named(self, framed: Framed, subject: str) -> RegisteredCodec:
        """Return the schema that a value names; raise `SchemaRegistryError` if the registry does not have it."""
        place = (subject, framed.named)
        known = self._by_name.get(place)
        if known is not None:
            self._by_name.move_to_end(place)
            return known
        now = asyncio.get_running_loop().time()
        refused = self._unknown.get(place)
        if refused is not None and refused[0] > now:
            raise refused[1]
        request = GetSchemaRequest(id=framed.schema_id or 0, guid=framed.guid or "", subject=subject, format=_COMPILED)
        try:
            schema = _codec((await self._schemas.get(request)).schema)
        except SchemaRegistryError as error:
            _cache(self._unknown, place, (now + LATEST_S, error))
            raise
        _cache(self._by_name, place, schema)
        return schema


_of_clients: Final[WeakKeyDictionary[Client, SchemaCodecs]] = WeakKeyDictionary()


def use_codecs(client: Client, codecs: SchemaCodecs) -> None:
    """Share these codecs among all users of a client, until `forget_codecs`."""
    _of_clients[client] = codecs


def forget_codecs(client: Client) -> None:
    """Release the codecs of a client, which refer to it."""
    _of_clients.pop(client, None)


def codecs_of(client: Client) -> SchemaCodecs:
    """Return the codecs of a client, which all its users share."""
    codecs = _of_clients.get(client)
    if codecs is None:
        codecs = _of_clients[client] = SchemaCodecs(client)
    return codecs


def _codec(schema: SchemaMessage | None) -> RegisteredCodec:
    if schema is None:
        raise SchemaMismatch("the registry's response has no schema")
    return RegisteredCodec(schema)


def _cache(cache: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    cache[key] = value
    cache.move_to_end(key)
    while len(cache) > KEPT_MAX:
        cache.popitem(last=False)
