"""The schemas of a topic, whether stored messages conform to a new one, and import and export through `_schemas`."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from millstream.client.admin.position import Position
from millstream.client.admin.schemas import SchemaClient
from millstream.client.admin.tailer import Tailer
from millstream.client.admin.topics import create_topic, find_topic, offset_bounds, offsets_at
from millstream.core.errors import (
    Conflict,
    InvalidRequest,
    MillstreamError,
    NotFound,
    SchemaMismatch,
    SchemaRegistryError,
)
from millstream.core.schema import AVRO, CONFIG_KEYS, DEFAULT_CONTEXT, IMPORT, READWRITE, QualifiedSubject, RegistryCode
from millstream.core.topic import SCHEMA_KEY, SCHEMA_VALIDATE, SCHEMA_VALUE
from millstream.protocol.private.schema_messages import (
    CheckSchemaRequest,
    ConfigureRequest,
    DeleteSubjectRequest,
    GetSubjectRequest,
    ListSubjectsRequest,
    RegisterSchemaRequest,
    SchemaMessage,
    SettingsResponse,
)
from millstream.protocol.records.batch import iterate_whole_headers
from millstream.protocol.records.record import NewRecord, Record, decode_batch, encode_batch
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.fetch import READ_COMMITTED

if TYPE_CHECKING:
    from millstream.protocol.schemas.codec import Codec


# Schemas in the form in which Confluent's registry keeps them: a compacted topic, usually `_schemas`.
#
# Importing keeps ids and versions, and is for contexts that have no schemas yet. Exporting writes a new topic.

_FETCH_BYTES: Final = 1024 * 1024
_MESSAGE_BYTES_MAX: Final = 8 * 1024 * 1024
"""More than the record of the largest schema."""


class _Reference(msgspec.Struct, frozen=True):
    name: str
    subject: str
    version: int


class _Value(msgspec.Struct, frozen=True, rename="camel"):
    subject: str
    version: int
    id: int
    schema: str
    schema_type: str | None = None
    references: list[_Reference] | None = None
    metadata: dict[str, Any] | None = None
    rule_set: dict[str, Any] | None = None
    deleted: bool = False


class _TopicContents(NamedTuple):
    schemas: list[_Value]
    configs: dict[str, dict[str, Any]]
    """Configuration by subject; that of an empty one applies to all others."""
    modes: dict[str, str]


async def import_schemas(source: Client, topic: str, target: Client, *, context: str = DEFAULT_CONTEXT) -> int:
    """Register everything that a topic holds with its ids; return the number of versions.

    Subjects of the default context go to the given one. A context that has schemas is refused.
    """
    kept, registry = _fold(await _read(source, topic)), SchemaClient(target)
    places = {value.subject: _place(value.subject, context) for value in kept.schemas}
    contexts = sorted({place.context for place in places.values()})
    for context_name in contexts:
        held = await registry.subjects(
            ListSubjectsRequest(prefix=str(QualifiedSubject(context_name, "")), deleted=True)
        )
        if held.subjects:
            raise Conflict(f"context {context_name!r} has schemas already; import into an empty one (--context .NAME)")
    try:
        for context_name in contexts:
            await registry.configure(ConfigureRequest(subject=str(QualifiedSubject(context_name, "")), mode=IMPORT))
        await _register(registry, kept.schemas, places)
    finally:
        for context_name in contexts:
            await registry.configure(ConfigureRequest(subject=str(QualifiedSubject(context_name, "")), reset_mode=True))
    for subject, config in kept.configs.items():
        await registry.configure(ConfigureRequest(subject=str(_place(subject, context)), config=config))
    for subject, mode in kept.modes.items():
        await registry.configure(ConfigureRequest(subject=str(_place(subject, context)), mode=mode, force=True))
    return len(kept.schemas)


async def _register(registry: SchemaClient, schemas: Iterable[_Value], places: Mapping[str, QualifiedSubject]) -> None:
    """Register schemas after those that they refer to, which have smaller ids; delete those that were deleted."""
    listed = sorted(schemas, key=lambda value: (value.id, value.version))
    for value in listed:
        request = RegisterSchemaRequest(
            subject=str(places[value.subject]),
            schema=value.schema,
            schema_type=value.schema_type or AVRO,
            references=[(reference.name, reference.subject, reference.version) for reference in value.references or ()],
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
            await registry.delete(DeleteSubjectRequest(subject=subject, version=version))


async def export_schemas(client: Client, topic: str, *, context: str = DEFAULT_CONTEXT) -> tuple[int, list[str]]:
    """Write the schemas of a context to a new topic, or to one without messages.

    Return the number of versions, and the other contexts that have subjects.
    """
    await _prepare_topic(client, topic)
    registry = SchemaClient(client)
    prefix = str(QualifiedSubject(context, ""))
    schemas: list[SchemaMessage] = []
    while page := (
        await registry.subjects(ListSubjectsRequest(prefix=prefix, deleted=True, schemas=True, offset=len(schemas)))
    ).schemas:
        schemas += page
    records = _settings_records(None, await registry.settings(prefix))
    for subject in dict.fromkeys(schema.subject for schema in schemas):
        records += _settings_records(subject, await registry.settings(subject))
    records += [_schema_record(schema) for schema in sorted(schemas, key=lambda schema: (schema.id, schema.version))]
    for record in records:
        await client.produce(topic, 0, encode_batch([record]))
    everything = await registry.subjects(ListSubjectsRequest(prefix=":*:", deleted=True))
    others = {QualifiedSubject.parse(subject).context for subject in everything.subjects} - {context}
    return len(schemas), sorted(others)


async def _prepare_topic(client: Client, topic: str) -> None:
    try:
        topic_metadata = await find_topic(client, topic)
    except NotFound:
        settings = {"cleanup.policy": "compact", "max.message.bytes": str(_MESSAGE_BYTES_MAX)}
        await create_topic(client, topic, partitions=1, replication=-1, settings=settings)
        return
    if any(
        start < end for start, end in (await offset_bounds(client, topic, list(topic_metadata.partitions))).values()
    ):
        raise Conflict(f"topic {topic!r} has messages; export to a new one")


async def _read(client: Client, topic: str) -> dict[str, bytes | None]:
    """Return the last value of each key, in the order of these."""
    advice = "name a broker of the cluster that has it with --from, and the topic, if it is not _schemas, with --topic"
    await find_topic(client, topic, advice=advice)
    ((offset, end),) = (await offset_bounds(client, topic, [0])).values()
    values: dict[str, bytes | None] = {}
    while offset < end:
        response = await client.fetch(topic, 0, offset, max_bytes=_FETCH_BYTES, max_wait_ms=500)
        if not response.records:
            # Compaction or a marker has taken the end.
            break
        for header in iterate_whole_headers(response.records):
            offset = max(offset, header.last_offset + 1)
            if header.is_control:
                continue
            for record in decode_batch(response.records, header):
                key = (record.key or b"").decode()
                values.pop(key, None)
                values[key] = record.value
    return values


def _fold(records: Mapping[str, bytes | None]) -> _TopicContents:
    schemas: dict[tuple[str, int], _Value] = {}
    configs: dict[str, dict[str, Any]] = {}
    modes: dict[str, str] = {}
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
            elif key["keytype"] == "CONFIG":
                config = json.loads(value)
                configs[key.get("subject") or ""] = {name: config[name] for name in CONFIG_KEYS if name in config}
            elif key["keytype"] == "MODE":
                modes[key.get("subject") or ""] = json.loads(value)["mode"]
    except (ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"the topic is not that of a schema registry: {error}") from error
    return _TopicContents(list(schemas.values()), configs, modes)


def _place(subject: str, context: str) -> QualifiedSubject:
    parsed = QualifiedSubject.parse(subject)
    return parsed._replace(context=context) if parsed.context == DEFAULT_CONTEXT else parsed


def _settings_records(subject: str | None, settings: SettingsResponse) -> list[NewRecord]:
    # A context always has a mode; the default one is not exported.
    mode = None if subject is None and settings.mode == READWRITE else settings.mode
    settings_by_name = {"CONFIG": settings.config, "MODE": {"mode": mode} if mode else None}
    return [
        NewRecord(
            _compact({"keytype": kind, "subject": subject, "magic": 0}),
            _compact({"subject": subject, **value}),
            timestamp_ms=_now_ms(),
        )
        for kind, value in settings_by_name.items()
        if value
    ]


def _schema_record(schema: SchemaMessage) -> NewRecord:
    key = {"keytype": "SCHEMA", "subject": schema.subject, "version": schema.version, "magic": 1}
    place = {"subject": schema.subject, "version": schema.version, "id": schema.id}
    value = {**place, **schema.as_confluent(), "deleted": schema.deleted}
    return NewRecord(_compact(key), _compact(value), timestamp_ms=_now_ms())


def _now_ms() -> int:
    return int(time.time() * 1000)


def _compact(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


LISTED_MAX: Final = 20
REASONS_MAX: Final = 1000


async def topic_schemas(client: Client, settings: Mapping[str, str | None]) -> dict[str, Any] | None:
    """Return the rule of a topic with the versions of its subjects; None if it has none."""
    subjects = {"key": settings.get(SCHEMA_KEY), "value": settings.get(SCHEMA_VALUE)}
    if not any(subjects.values()):
        return None
    described: dict[str, Any] = {"validate": settings.get(SCHEMA_VALIDATE)}
    for name, subject in subjects.items():
        if subject:
            described[name] = await _subject(client, subject)
    return described


async def _subject(client: Client, subject: str) -> dict[str, Any]:
    schemas = SchemaClient(client)
    try:
        versions = (await schemas.subject(GetSubjectRequest(subject=subject))).versions
        latest = await schemas.version(subject)
    except SchemaRegistryError as error:
        if error.code != RegistryCode.SUBJECT_NOT_FOUND:
            raise
        return {"subject": subject, "versions": [], "type": None, "id": None}
    return {"subject": subject, "versions": list(versions), "type": latest.schema_type, "id": latest.id}


@dataclass(slots=True, kw_only=True)
class SchemaTrial:
    """Whether a schema is compatible with its subject, and which stored messages it does not read."""

    reasons: list[str]
    """The reasons why it is incompatible; empty if it is compatible."""
    messages: int = 0
    unreadable: int = 0
    skipped: int = 0
    """Messages without a schema, which no schema reads."""
    first: list[dict[str, Any]] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)

    def document(self) -> dict[str, Any]:
        return {
            "compatible": not self.reasons,
            "reasons": self.reasons,
            "messages": self.messages,
            "unreadable": self.unreadable,
            "without_schema": self.skipped,
            "first": self.first,
        }


async def try_schema(
    client: Client, new: CheckSchemaRequest, *, topic: str | None, since: Position | None, patience_s: float
) -> SchemaTrial:
    """Check a schema against its subject, and read the messages of a topic with it; nothing is registered."""
    from millstream.protocol.schemas.codec import codec_of

    trial_response = await SchemaClient(client).try_out(new)
    trial = SchemaTrial(reasons=list(trial_response.reasons))
    if topic is None:
        return trial
    reader = codec_of(new.schema_type, trial_response.compiled)
    described = await find_topic(client, topic)
    partitions = [int(index) for index in described.partitions]
    bounds = await offset_bounds(client, topic, partitions, isolation=READ_COMMITTED)
    starts = {index: start for index, (start, _) in bounds.items()}
    if since is not None:
        starts = await offsets_at(client, topic, partitions, since, isolation=READ_COMMITTED)
    ends = {index: end for index, (_, end) in bounds.items()}
    notes: list[str] = []
    tailer = Tailer(client, topic, starts, patience_s=patience_s, isolation=READ_COMMITTED, note=notes.append)
    is_key = new.subject.endswith("-key")
    async for message in tailer.until(ends):
        payload = message.record.key if is_key else message.record.value
        if payload is None:
            continue
        trial.messages += 1
        reason = await _unreadable(client, topic, "key" if is_key else "value", payload, message.record, reader)
        if reason is None:
            continue
        if reason == "":
            trial.skipped += 1
            continue
        trial.unreadable += 1
        if len(trial.counted) < REASONS_MAX or reason in trial.counted:
            trial.counted[reason] += 1
        if len(trial.first) < LISTED_MAX:
            trial.first.append({"partition": message.partition, "offset": message.record.offset, "reason": reason})
    return trial


async def _unreadable(
    client: Client, topic: str, name: str, payload: bytes, record: Record, reader: Codec
) -> str | None:
    """Return why a message cannot be read with a schema: None if it can, an empty text if it has no schema."""
    from millstream.client.schemas import codecs_of
    from millstream.protocol.schemas.framing import schema_header, unframe

    try:
        framed = unframe(payload, schema_header(record.headers, name))
    except SchemaMismatch:
        return ""
    try:
        writer = await codecs_of(client).named(framed, f"{topic}-{name}")
        writer.codec.check_readable(framed, reader)
    except MillstreamError as error:
        return str(error)
    return None
