"""The check of a batch's records against a topic's schema rule, of either their ids or their content.

Ids in front of keys and values are compared in compiled code, all at once. If some records name their schema in a
header, or fail, all are examined one by one. A record without a value, or without a key, conforms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import numpy as np

from millstream.core.errors import CorruptBatch, RecordError, SchemaMismatch
from millstream.protocol.records.batch import BatchHeader
from millstream.protocol.records.layout import BATCHES, PARSING, RECORDS, Table, read_only
from millstream.protocol.records.record import decode_headers, walk_records
from millstream.protocol.schemas.codec import Codec
from millstream.protocol.schemas.framing import HEADERS, PREFIX_BYTES, Framed, schema_header, unframe

KEY, VALUE = "key", "value"
ERRORS_MAX: Final = 1000
"""The maximum number of records that are reported for a refused batch."""
FEW_RECORDS: Final = 64
"""Up to this many records, checking them one by one is faster than preparing arrays."""


class FieldRule(msgspec.Struct, frozen=True, kw_only=True):
    """The schemas of which keys or values have to name one."""

    subject: str
    context: str
    guids: Mapping[int, str]
    """The guid of each accepted id."""

    def accept(self, framed: Framed) -> int:
        """Return the id of the schema that a value names; raise `SchemaMismatch` if it is not of the subject."""
        if framed.schema_id is not None and framed.schema_id in self.guids:
            return framed.schema_id
        if framed.guid is not None:
            for schema_id, guid in self.guids.items():
                if guid == framed.guid:
                    return schema_id
        if not self.guids:
            raise SchemaMismatch(f"subject {self.subject!r} has no schema; register one")
        raise SchemaMismatch(f"{framed.named} is not a schema of subject {self.subject!r}")


Rules = Mapping[str, FieldRule]
"""The rules of a topic, by field: key, value."""

CodecOf = Callable[[FieldRule, int], Codec]


def check_ids(section: bytes, header: BatchHeader, rules: Rules) -> list[RecordError]:
    """Return the records that do not name a schema of their subject."""
    if header.record_count > FEW_RECORDS and have_known_ids(section, header, rules):
        return []
    return _check(section, header, rules, None)


def check_content(section: bytes, header: BatchHeader, rules: Rules, codec_of: CodecOf) -> list[RecordError]:
    """Return the records that do not name a schema of their subject, do not decode with it or do not satisfy it."""
    return _check(section, header, rules, codec_of)


def have_known_ids(section: bytes, header: BatchHeader, rules: Rules) -> bool:
    """Whether all records have an accepted id in front of their fields, found in compiled code; False if in doubt."""
    if _fields_in_headers(section, rules):
        return False
    records = _parse(section, header)
    data = np.frombuffer(section, np.uint8)
    for field, rule in rules.items():
        at, length = records[f"{field}_at"].astype(np.int64), records[f"{field}_length"]
        starts = at[length >= 0]
        if np.any((length >= 0) & (length < PREFIX_BYTES)) or np.any(data[starts]):
            return False
        ids = np.zeros(starts.size, np.int64)
        for step in range(1, PREFIX_BYTES):
            ids = ids << 8 | data[starts + step]
        if not np.isin(ids, np.fromiter(rule.guids, np.int64, len(rule.guids))).all():
            return False
    return True


def _check(section: bytes, header: BatchHeader, rules: Rules, codec_of: CodecOf | None) -> list[RecordError]:
    headed = _fields_in_headers(section, rules)
    wrong: list[RecordError] = []
    for index, (_, _, key_at, key_end, value_at, value_end, end) in enumerate(walk_records(section, header)):
        headers = decode_headers(section, value_end, end) if headed else ()
        for field, rule in rules.items():
            start, stop = (key_at, key_end) if field == KEY else (value_at, value_end)
            if start < 0:
                continue
            try:
                framed = unframe(section[start:stop], schema_header(headers, field) if headers else None)
                schema_id = rule.accept(framed)
                if codec_of is not None:
                    codec_of(rule, schema_id).check(framed)
            except SchemaMismatch as error:
                wrong.append(RecordError(index, f"{field}: {error}"))
                break
        if len(wrong) == ERRORS_MAX:
            break
    return wrong


def _fields_in_headers(section: bytes, rules: Rules) -> frozenset[str]:
    """Return the fields whose schema header occurs anywhere in a batch."""
    return frozenset(field for field in rules if HEADERS[field].encode() in section)


def _parse(section: bytes, header: BatchHeader) -> Table:
    """Find the fields of all records in compiled code."""
    from millstream.protocol.records.kernels import parse

    batch, state = np.zeros(1, BATCHES), np.zeros(1, PARSING)
    batch["records_end"] = len(section)
    batch["last_delta"] = header.last_offset_delta
    batch["record_count"] = count = header.record_count
    records = np.empty(count, RECORDS)
    offsets, times, attributes = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int16)
    data = read_only(np.frombuffer(section, np.uint8))
    done = 0
    while done < count:
        rows, fault = parse.parse_records(
            data, batch, state, 0, 2**62, offsets[done:], times[done:], attributes[done:], records[done:]
        )
        if fault:
            raise CorruptBatch(parse.FAULTS[fault])
        done += rows
    return records
