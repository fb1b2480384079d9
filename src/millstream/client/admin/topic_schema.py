"""The schemas of a topic: which subjects its rule names, their versions, and whether stored messages fit a new one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from millstream.client.admin.position import Position
from millstream.client.admin.schemas import SchemaClient
from millstream.client.admin.tailer import Tailer
from millstream.client.admin.topics import find_topic, offset_bounds, offsets_at
from millstream.core.errors import MillstreamError, SchemaMismatch, SchemaRegistryError
from millstream.core.schema import RegistryCode
from millstream.core.topic import SCHEMA_KEY, SCHEMA_VALIDATE, SCHEMA_VALUE
from millstream.protocol.private.schema_messages import CheckSchema, GetSubject
from millstream.protocol.records.record import Record
from millstream.protocol.wire.fetch import READ_COMMITTED

if TYPE_CHECKING:
    from millstream.protocol.schemas.codec import Codec
    from millstream.protocol.wire.client import Client

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
        versions = (await schemas.subject(GetSubject(subject=subject))).versions
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
    """Why it is incompatible; empty if it is compatible."""
    messages: int = 0
    unreadable: int = 0
    skipped: int = 0
    """Messages without a schema, which no schema reads."""
    first: list[dict[str, Any]] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)

    def document(self) -> dict[str, Any]:
        """Return what was found as JSON."""
        return {
            "compatible": not self.reasons,
            "reasons": self.reasons,
            "messages": self.messages,
            "unreadable": self.unreadable,
            "without_schema": self.skipped,
            "first": self.first,
        }


async def try_schema(
    client: Client, new: CheckSchema, *, topic: str | None, since: Position | None, patience_s: float
) -> SchemaTrial:
    """Check a schema against its subject, and read the messages of a topic with it; nothing is registered."""
    from millstream.protocol.schemas.codec import codec_of

    found = await SchemaClient(client).try_out(new)
    trial = SchemaTrial(reasons=list(found.reasons))
    if topic is None:
        return trial
    reader = codec_of(new.schema_type, found.compiled)
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
    """Why a message cannot be read with a schema; None if it can, nothing if it has no schema."""
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
