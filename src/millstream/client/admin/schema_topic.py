"""Schemas in the form in which Confluent's registry keeps them: a compacted topic, usually `_schemas`.

Importing keeps ids and versions, and is for contexts that have no schemas yet. Exporting writes a new topic.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from millstream.client.admin.schemas import SchemaClient
from millstream.client.admin.topics import create_topic, find_topic, offset_bounds
from millstream.core.errors import Conflict, InvalidRequest, NotFound, SchemaRegistryError
from millstream.core.schema import AVRO, DEFAULT_CONTEXT, IMPORT, QualifiedSubject
from millstream.protocol.private.schema_messages import (
    Configure,
    DeleteSubject,
    ListSubjects,
    RegisterSchema,
    SchemaMessage,
)
from millstream.protocol.records.batch import iterate_whole_headers
from millstream.protocol.records.record import NewRecord, decode_batch, encode_batch
from millstream.protocol.wire.client import Client

_FETCH_BYTES: Final = 1024 * 1024
_MESSAGE_BYTES_MAX: Final = 8 * 1024 * 1024
"""More than the record of the largest schema."""


class _Reference(msgspec.Struct, frozen=True):
    name: str
    subject: str
    version: int


class _Value(msgspec.Struct, frozen=True, rename="camel"):
    """The value of a schema's record."""

    subject: str
    version: int
    id: int
    schema: str
    schema_type: str = AVRO
    references: list[_Reference] = []
    metadata: dict[str, Any] | None = None
    rule_set: dict[str, Any] | None = None
    deleted: bool = False


class _Kept(NamedTuple):
    """What a topic holds once it is read to its end."""

    schemas: list[_Value]
    levels: dict[str, str]
    """Compatibility levels by subject; an empty one is that of all others."""


async def import_schemas(source: Client, topic: str, target: Client, *, context: str = DEFAULT_CONTEXT) -> int:
    """Register everything that a topic holds with its ids; return the number of versions.

    Subjects of the default context go to the given one. A context that has schemas is refused.
    """
    kept, registry = _fold(await _read(source, topic)), SchemaClient(target)
    places = {value.subject: _place(value.subject, context) for value in kept.schemas}
    contexts = sorted({place.context for place in places.values()})
    for one in contexts:
        held = await registry.subjects(ListSubjects(prefix=str(QualifiedSubject(one, "")), deleted=True))
        if held.subjects:
            raise Conflict(f"context {one!r} has schemas already; import into an empty one (--context .NAME)")
    try:
        for one in contexts:
            await registry.configure(Configure(subject=str(QualifiedSubject(one, "")), mode=IMPORT))
        await _register(registry, kept.schemas, places)
    finally:
        for one in contexts:
            await registry.configure(Configure(subject=str(QualifiedSubject(one, "")), reset_mode=True))
    for subject, level in kept.levels.items():
        place = places.get(subject) or _place(subject, context)
        await registry.configure(Configure(subject=str(place), config={"compatibilityLevel": level}))
    return len(kept.schemas)


async def _register(registry: SchemaClient, schemas: Iterable[_Value], places: Mapping[str, QualifiedSubject]) -> None:
    """Register schemas after those that they refer to, which have smaller ids; delete those that were deleted."""
    listed = sorted(schemas, key=lambda value: (value.id, value.version))
    for value in listed:
        request = RegisterSchema(
            subject=str(places[value.subject]),
            schema=value.schema,
            schema_type=value.schema_type,
            references=[(one.name, one.subject, one.version) for one in value.references],
            metadata=value.metadata,
            rule_set=value.rule_set,
            id=value.id,
            version=value.version,
        )
        try:
            await registry.register(request)
        except SchemaRegistryError as error:
            raise SchemaRegistryError(
                f"version {value.version} of {value.subject!r} with id {value.id} could not be imported: {error}",
                code=error.code,
            ) from error
    # The newest first, since others may refer to the older ones.
    for value in reversed(listed):
        if value.deleted:
            subject, version = str(places[value.subject]), str(value.version)
            await registry.delete(DeleteSubject(subject=subject, version=version))


async def export_schemas(client: Client, topic: str, *, context: str = DEFAULT_CONTEXT) -> int:
    """Write the schemas of a context to a new topic, or to one without messages; return the number of versions."""
    await _prepare_topic(client, topic)
    registry = SchemaClient(client)
    prefix = str(QualifiedSubject(context, ""))
    schemas: list[SchemaMessage] = []
    while page := (
        await registry.subjects(ListSubjects(prefix=prefix, deleted=True, schemas=True, offset=len(schemas)))
    ).schemas:
        schemas += page
    records = [_config_record(None, (await registry.settings(prefix)).config)]
    subjects = dict.fromkeys(one.subject for one in schemas)
    records += [_config_record(subject, (await registry.settings(subject)).config) for subject in subjects]
    records += [_schema_record(one) for one in sorted(schemas, key=lambda one: (one.id, one.version))]
    for record in records:
        if record is not None:
            await client.produce(topic, 0, encode_batch([record]))
    return len(schemas)


async def _prepare_topic(client: Client, topic: str) -> None:
    try:
        found = await find_topic(client, topic)
    except NotFound:
        settings = {"cleanup.policy": "compact", "max.message.bytes": str(_MESSAGE_BYTES_MAX)}
        await create_topic(client, topic, partitions=1, replication=-1, settings=settings)
        return
    if any(start < end for start, end in (await offset_bounds(client, topic, list(found.partitions))).values()):
        raise Conflict(f"topic {topic!r} has messages; export to a new one")


async def _read(client: Client, topic: str) -> dict[str, bytes | None]:
    """Return the last value of each key, in the order of these."""
    await find_topic(client, topic)
    ((offset, end),) = (await offset_bounds(client, topic, [0])).values()
    found: dict[str, bytes | None] = {}
    while offset < end:
        answer = await client.fetch(topic, 0, offset, max_bytes=_FETCH_BYTES, max_wait_ms=500)
        if not answer.records:
            # Compaction or a marker has taken the end.
            break
        for header in iterate_whole_headers(answer.records):
            offset = max(offset, header.last_offset + 1)
            if header.is_control:
                continue
            for record in decode_batch(answer.records, header):
                key = (record.key or b"").decode()
                found.pop(key, None)
                found[key] = record.value
    return found


def _fold(records: Mapping[str, bytes | None]) -> _Kept:
    schemas: dict[tuple[str, int], _Value] = {}
    levels: dict[str, str] = {}
    try:
        for text, value in records.items():
            key = json.loads(text)
            if value is None:
                continue
            if key["keytype"] == "SCHEMA":
                decoded = msgspec.json.decode(value, type=_Value)
                schemas[decoded.subject, decoded.version] = decoded
            elif key["keytype"] == "DELETE_SUBJECT":
                last = json.loads(value)["version"]
                for place, decoded in schemas.items():
                    if place[0] == key["subject"] and place[1] <= last:
                        schemas[place] = msgspec.structs.replace(decoded, deleted=True)
            elif key["keytype"] == "CONFIG" and (level := json.loads(value).get("compatibilityLevel")):
                levels[key.get("subject") or ""] = str(level)
    except (ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"the topic is not that of a schema registry: {error}") from error
    return _Kept(list(schemas.values()), levels)


def _place(subject: str, context: str) -> QualifiedSubject:
    parsed = QualifiedSubject.parse(subject)
    return parsed._replace(context=context) if parsed.context == DEFAULT_CONTEXT else parsed


def _config_record(subject: str | None, config: Mapping[str, Any] | None) -> NewRecord | None:
    if not config:
        return None
    key = {"keytype": "CONFIG", "subject": subject, "magic": 0}
    return NewRecord(_compact(key), _compact(config), timestamp_ms=_now_ms())


def _schema_record(schema: SchemaMessage) -> NewRecord:
    key = {"keytype": "SCHEMA", "subject": schema.subject, "version": schema.version, "magic": 1}
    value: dict[str, Any] = {"subject": schema.subject, "version": schema.version, "id": schema.id}
    if schema.schema_type != AVRO:
        value["schemaType"] = schema.schema_type
    if schema.references:
        value["references"] = [
            {"name": name, "subject": subject, "version": version} for name, subject, version in schema.references
        ]
    value |= {"metadata": schema.metadata} if schema.metadata is not None else {}
    value |= {"ruleSet": schema.rule_set} if schema.rule_set is not None else {}
    value |= {"schema": schema.schema, "deleted": schema.deleted}
    return NewRecord(_compact(key), _compact(value), timestamp_ms=_now_ms())


def _now_ms() -> int:
    return int(time.time() * 1000)


def _compact(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
