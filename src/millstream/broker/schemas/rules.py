"""Schema rules of topics: checks records before they are stored.

Ids in uncompressed batches are checked on the loop. Batches that have to be decompressed or decoded go to a child
process, and so do those that fail, to name the records at fault; the connection that sent it waits meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from millstream.broker.schemas.record_worker import CompiledSchema, RecordsRequest, RecordsResponse, schema_key
from millstream.broker.schemas.registry import SchemaRegistry
from millstream.core.child_pool import ChildDied, ChildPool, ChildTimedOut
from millstream.core.errors import BatchRejected, CorruptBatch, InvalidBatch, RecordError
from millstream.core.metric import Metric, Sample, counter
from millstream.core.schema import QualifiedSubject
from millstream.core.topic import VALIDATE_CONTENT, TopicSettings
from millstream.protocol.records.batch import (
    COMPRESSION_NONE,
    HEADER_BYTES,
    BatchHeader,
    Buffer,
    check_crc,
    read_header,
)
from millstream.protocol.schemas.formats import COMPILED
from millstream.protocol.schemas.framing import NO_SCHEMA_ID
from millstream.protocol.schemas.record_check import FEW_RECORDS, KEY, VALUE, FieldRule, check_ids, have_known_ids

_logger = logging.getLogger(__name__)

MODULE: Final = "millstream.broker.schemas.record_worker"
RULES_MAX: Final = 4096
LOOP_RECORDS_MAX: Final = 50_000
LOOP_BYTES_MAX: Final = 4 * 1024 * 1024
"""The size of batches that are checked on the loop; compiled code takes a millisecond for it."""
ROUNDS_MAX: Final = 3
"""How often a batch is checked again with schemas that the child lacks, or that this node did not know."""
_LISTED_MAX: Final = 5


class SchemaRule(NamedTuple):
    """The rule of a topic, with the ids that are accepted after a change of the registry."""

    fields: dict[str, FieldRule]
    checks_content: bool
    change: int


class SchemaRules:
    """Checks the records of all topics with a rule."""

    def __init__(self, registry: SchemaRegistry) -> None:
        self._registry = registry
        self._children = ChildPool(MODULE, noun="record batches")
        self._rules: dict[tuple[str, str, str], SchemaRule] = {}
        self._is_compiled = False
        self._compiling: asyncio.Task[None] | None = None
        self.checked_on_loop = 0
        self.checked_in_child = 0
        self.rejected = 0

    def metrics(self) -> Iterable[Metric]:
        yield Metric(
            "millstream_schema_checks_total",
            "counter",
            "Record batches of topics with a schema rule that were checked.",
            (Sample(self.checked_on_loop, (("where", "loop"),)), Sample(self.checked_in_child, (("where", "child"),))),
        )
        yield counter(
            "millstream_schema_rejections_total",
            "Record batches that did not conform to their topic's schema rule.",
            self.rejected,
        )

    async def close(self) -> None:
        if self._compiling is not None:
            await asyncio.gather(self._compiling, return_exceptions=True)
        await self._children.close()

    def conforms(self, records: Buffer, settings: TopicSettings) -> bool:
        """Whether a batch certainly conforms, decided at once; otherwise `check` has to decide."""
        rule = self._find_rule(settings)
        if rule.checks_content:
            return False
        try:
            header = read_header(records)
            if header.compression != COMPRESSION_NONE or not self._is_light(header):
                return False
            section = bytes(records[HEADER_BYTES : header.end_position])
            few = header.record_count <= FEW_RECORDS
            is_known = (
                not check_ids(section, header, rule.fields) if few else have_known_ids(section, header, rule.fields)
            )
        except BatchRejected:
            # Producers may not send this; the log reports the error.
            return False
        self.checked_on_loop += is_known
        return is_known

    def _is_light(self, header: BatchHeader) -> bool:
        if header.record_count <= FEW_RECORDS:
            return header.length <= LOOP_BYTES_MAX
        return self._is_compiled and header.record_count <= LOOP_RECORDS_MAX and header.length <= LOOP_BYTES_MAX

    async def check(self, records: Buffer, settings: TopicSettings) -> None:
        """Raise `InvalidBatch` with the records at fault unless a batch conforms to its topic's rule."""
        if not self._is_compiled and not self._find_rule(settings).checks_content:
            await self._compile()
        if self.conforms(records, settings):
            return
        try:
            header = read_header(records)
        except BatchRejected:
            return
        if header.end_position != len(records):
            # More than one batch, or part of one: the log refuses it.
            return
        for _round in range(ROUNDS_MAX):
            rule = self._find_rule(settings)
            wrong = await self._check_in_child(bytes(records), rule)
            if wrong:
                # Another node may have registered the schema.
                await self._registry.load()
            if not wrong or self._registry.last_change == rule.change:
                break
        self.checked_in_child += 1
        if wrong:
            self.rejected += 1
            raise _rejection_error(wrong, header)

    async def _check_in_child(self, batch: bytes, rule: SchemaRule) -> list[RecordError]:
        schemas: list[CompiledSchema] = []
        for _round in range(ROUNDS_MAX):
            request = RecordsRequest(batch=batch, rules=rule.fields, content=rule.checks_content, schemas=schemas)
            response = await self._send_request(msgspec.msgpack.encode(request))
            if response.unreadable is not None:
                # A batch that was damaged on its way is sent again by clients.
                check_crc(batch, read_header(batch))
                raise InvalidBatch(f"the records cannot be checked against the topic's schema: {response.unreadable}")
            if not response.missing:
                return [RecordError(index, reason) for index, reason in response.wrong]
            schemas = [await self._find_compiled(rule, key) for key in response.missing]
        raise InvalidBatch(f"the records of one batch have more schemas than can be checked: {len(schemas)}")

    async def _send_request(self, body: bytes) -> RecordsResponse:
        try:
            return msgspec.msgpack.decode(await self._children.request(body), type=RecordsResponse)
        except ChildTimedOut:
            limit_s = self._children.response_s
            raise InvalidBatch(
                f"the records could not be checked against the topic's schema within {limit_s:.0f} s"
            ) from None
        except ChildDied:
            raise InvalidBatch("the records take too much memory to be checked against the topic's schema") from None

    async def _find_compiled(self, rule: SchemaRule, key: str) -> CompiledSchema:
        for field in rule.fields.values():
            for schema_id in field.guids:
                if schema_key(field, schema_id) == key:
                    schema = await self._registry.find_schema(schema_id, QualifiedSubject(field.context, ""))
                    text = await self._registry.render(schema, COMPILED)
                    return CompiledSchema(key=key, schema_type=schema.content.schema_type, compiled=text)
        raise CorruptBatch("the process that checks records requested an unknown schema")

    def _find_rule(self, settings: TopicSettings) -> SchemaRule:
        declared = (settings.schema_key, settings.schema_value, settings.schema_validate)
        rule = self._rules.get(declared)
        if rule is None or rule.change != self._registry.last_change:
            named = {KEY: settings.schema_key, VALUE: settings.schema_value}
            fields = {field: self._field_rule(subject) for field, subject in named.items() if subject}
            rule = SchemaRule(fields, settings.schema_validate == VALIDATE_CONTENT, self._registry.last_change)
            while len(self._rules) >= RULES_MAX:
                del self._rules[next(iter(self._rules))]
            self._rules[declared] = rule
        return rule

    def _field_rule(self, subject: str) -> FieldRule:
        live = self._registry.versions(QualifiedSubject.parse(subject)).live
        guids = {version.schema_id: self._registry.schema_of(version).guid for version in live}
        context = live[0].subject.context if live else QualifiedSubject.parse(subject).context
        return FieldRule(subject=subject, context=context, guids=guids)

    async def _compile(self) -> None:
        """Load the compiled code in a thread, once: it takes a while. Where that fails, children check all batches."""
        if self._compiling is None:
            self._compiling = asyncio.ensure_future(asyncio.to_thread(_warm_up))
            self._compiling.add_done_callback(self._compiled_or_not)
        await asyncio.wait([self._compiling])

    def _compiled_or_not(self, compiling: asyncio.Task[None]) -> None:
        if compiling.cancelled():
            return
        error = compiling.exception()
        self._is_compiled = error is None
        if error is not None:
            _logger.warning("schema ids are checked in child processes only", extra={"reason": repr(error)})


def _warm_up() -> None:
    from millstream.protocol.records.record import NewRecord, encode_batch

    batch = bytes(encode_batch([NewRecord(b"\0\0\0\0\1", b"\0\0\0\0\1", (), 0)] * 2))
    header = read_header(batch)
    field = FieldRule(subject="", context="", guids={1: ""})
    have_known_ids(batch[HEADER_BYTES:], header, {KEY: field, VALUE: field})


def _rejection_error(wrong: list[RecordError], header: BatchHeader) -> InvalidBatch:
    first = "; ".join(f"record {error.batch_index}: {error.message}" for error in wrong[:_LISTED_MAX])
    more = "; …" if len(wrong) > _LISTED_MAX else ""
    verb = "does" if len(wrong) == 1 else "do"
    hint = "; encode messages with a serializer, `millstream publish --schema SUBJECT` or ?schema=SUBJECT over HTTP"
    more += hint if NO_SCHEMA_ID in first else ""
    records = "record" if header.record_count == 1 else "records"
    error = InvalidBatch(
        f"{len(wrong)} of {header.record_count} {records} {verb} not conform to the topic's schema: {first}{more}"
    )
    error.records = wrong
    return error
