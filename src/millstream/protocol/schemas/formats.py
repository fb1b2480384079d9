"""The common interface of the formats: parse a schema of any type, check it against earlier ones, convert it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from millstream.core.schema import AVRO, JSON_SCHEMA, PROTOBUF

DEPTH_MAX: Final = 200
"""How deep a schema may be nested."""


class InvalidSchema(Exception):
    """The text is not a schema of its type."""


class Difference(NamedTuple):
    """A reason why a reader's schema cannot read what a writer's schema wrote.

    In the description, `{reader}` and `{writer}` are replaced by "new" and "old", or the reverse.
    """

    kind: str
    description: str
    detail: str = ""

    def render(self, *, reader_is_new: bool) -> str:
        """Write the reason as clients see it."""
        reader, writer = ("new", "old") if reader_is_new else ("old", "new")
        text = self.description.replace("{reader}", reader).replace("{writer}", writer)
        if self.detail:
            return f"{{errorType:'{self.kind}', description:'{text}', additionalInfo:'{self.detail}'}}"
        return f'{{errorType:"{self.kind}", description:"{text}"}}'


def read_json(text: str) -> Any:
    """Decode JSON, or raise `InvalidSchema`."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidSchema(f"the schema is not JSON: {error}") from error


def write_json(value: Any, *, is_sorted: bool = False) -> str:
    return msgspec.json.encode(value, order="sorted" if is_sorted else None).decode()


COMPILED: Final = "compiled"
MESSAGES_MAX: Final = 100
MESSAGE_CHARACTERS_MAX: Final = 10_000


class SchemaText(msgspec.Struct, frozen=True, kw_only=True):
    """A schema with the texts of all its references, each after its own references."""

    schema_type: str
    text: str
    references: Sequence[tuple[str, str]] = ()
    version: int = 0


class ParsedTexts(NamedTuple):
    """The texts by which a schema is stored and recognized."""

    canonical: str
    normalized: str


class _Schema(Protocol):
    def canonical(self) -> str: ...

    def normalized(self) -> str: ...

    def resolved(self) -> str: ...


def parse(schema: SchemaText) -> ParsedTexts:
    """Check a schema; raise `InvalidSchema` with the reason."""
    parsed = _parse(schema)
    if schema.schema_type == JSON_SCHEMA:
        from millstream.protocol.schemas.codec import JsonCodec

        reason = JsonCodec(_compiled(parsed, schema)).invalid_pattern()
        if reason is not None:
            raise InvalidSchema(f"the JSON Schema is invalid {reason}")
    return ParsedTexts(parsed.canonical(), parsed.normalized())


def render(schema: SchemaText, form: str) -> str:
    """Print a schema in another format: `resolved` writes out references, `serialized` is Protobuf's descriptor.

    `compiled` is all that a codec needs: an Avro schema with its references written out, a JSON array of a JSON Schema
    and the documents that it refers to, or the descriptors of a Protobuf file and all its imports in base 64.
    """
    parsed = _parse(schema)
    if form == COMPILED:
        return _compiled(parsed, schema)
    if form == "serialized" and schema.schema_type == PROTOBUF:
        from millstream.protocol.schemas.protobuf import ProtobufSchema

        return parsed.serialized() if isinstance(parsed, ProtobufSchema) else parsed.canonical()
    return parsed.resolved() if form == "resolved" else parsed.canonical()


def _compiled(parsed: _Schema, schema: SchemaText) -> str:
    if schema.schema_type == PROTOBUF:
        from millstream.protocol.schemas.protobuf import ProtobufSchema

        return parsed.descriptors() if isinstance(parsed, ProtobufSchema) else parsed.canonical()
    if schema.schema_type == JSON_SCHEMA:
        documents = {name: read_json(text) for name, text in schema.references}
        return write_json([read_json(schema.text), documents])
    return parsed.resolved()


def check(new: SchemaText, earlier: Sequence[SchemaText], level: str) -> list[str]:
    """Return why a schema is incompatible with earlier ones, given newest first; empty if it is compatible."""
    if level == "NONE":
        return []
    compared = earlier if level.endswith("_TRANSITIVE") else earlier[:1]
    direction = level.removesuffix("_TRANSITIVE")
    for old in compared:
        messages = _differences(new, old, direction)
        if messages:
            shown = old.text[:MESSAGE_CHARACTERS_MAX]
            return [
                *messages[:MESSAGES_MAX],
                f"{{oldSchemaVersion: {old.version}}}",
                f"{{oldSchema: '{shown}'}}",
                f"{{validateFields: 'false', compatibility: '{level}'}}",
            ]
    return []


def _differences(new: SchemaText, old: SchemaText, direction: str) -> list[str]:
    if new.schema_type != old.schema_type:
        return ["Incompatible because of different schema type"]
    messages: list[str] = []
    if direction in ("BACKWARD", "FULL"):
        messages += [incompatibility.render(reader_is_new=True) for incompatibility in _compare(reader=new, writer=old)]
    if direction in ("FORWARD", "FULL"):
        messages += [
            incompatibility.render(reader_is_new=False) for incompatibility in _compare(reader=old, writer=new)
        ]
    return messages


# Each format is loaded when it is first needed.


def _parse(schema: SchemaText) -> _Schema:
    if schema.schema_type == AVRO:
        from millstream.protocol.schemas.avro import AvroSchema

        return AvroSchema.parse(schema.text, schema.references)
    if schema.schema_type == JSON_SCHEMA:
        from millstream.protocol.schemas.json_schema import JsonSchema

        return JsonSchema.parse(schema.text, schema.references)
    if schema.schema_type == PROTOBUF:
        from millstream.protocol.schemas.protobuf import ProtobufSchema

        return ProtobufSchema.parse(schema.text, schema.references)
    raise InvalidSchema(f"Invalid schema type {schema.schema_type}")


def _compare(*, reader: SchemaText, writer: SchemaText) -> list[Difference]:
    if reader.schema_type == AVRO:
        from millstream.protocol.schemas import avro

        return avro.compare(
            avro.AvroSchema.parse(reader.text, reader.references), avro.AvroSchema.parse(writer.text, writer.references)
        )
    if reader.schema_type == JSON_SCHEMA:
        from millstream.protocol.schemas import json_schema

        return json_schema.compare(
            json_schema.JsonSchema.parse(reader.text, reader.references),
            json_schema.JsonSchema.parse(writer.text, writer.references),
        )
    from millstream.protocol.schemas import protobuf

    return protobuf.compare(
        protobuf.ProtobufSchema.parse(reader.text, reader.references),
        protobuf.ProtobufSchema.parse(writer.text, writer.references),
    )
