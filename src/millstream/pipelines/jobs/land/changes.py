"""Messages as changes of rows by key, for tables with one row per key.

A change is a decoded row with its key, its order value and whether it deletes the key. Debezium's envelopes are opened
first: the row is in `after`, or in `before` of a delete.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.core.errors import InvalidSetting
from millstream.core.payload_columns import order_column
from millstream.core.pipeline import DEBEZIUM, NO_DECODING, LandSettings
from millstream.pipelines.jobs.land.inference import column_of
from millstream.pipelines.lake.columns import EXACT_MAX, FieldPath, path_text, values_at
from millstream.pipelines.lake.merging import DELETED, KEY, ORDER, canonical_keys
from millstream.protocol.filter.batch import ColumnBatch
from millstream.protocol.filter.filter import Filter, compile_filter
from millstream.protocol.records.arrow import from_arrow

Flags = npt.NDArray[np.bool_]

_NO_VALUE: Final = b"null"
_EMPTY: Final = b"{}"


NO_ORDER: Final = ", which orders the changes of a key, is missing or null"
"""How the reason for a message without an order value ends."""


_ROUNDED: Final = (
    ": a column of type double may round numbers of 2^53 and more, so they cannot identify or order rows; declare the "
    "field as long or decimal in `schema`, in a new table"
)


def condition(text: str) -> Filter:
    """Compile a condition on messages whose payload fields need no `payload.` before them."""
    return _compiled(text)


_compiled = lru_cache(maxsize=64)(lambda text: compile_filter(text, bare_fields=True))


def condition_matches(text: str, batch: pa.RecordBatch, topic: str) -> Flags:
    """Return for every message of one partition whether a condition holds."""
    if not len(batch):
        return np.zeros(0, np.bool_)
    compiled = condition(text)
    partition = int(batch.column("partition")[0].as_py())
    columns = from_arrow(batch.select([name for name in _READ if name in batch.schema.names]))
    return compiled.matches(ColumnBatch(columns, topic=topic, partition=partition, uses=compiled.uses))


_READ: Final = ("offset", "timestamp", "key", "value", "headers")


Deleted = dict[bytes | None, int]
"""The message keys of one partition whose last change event is a delete, with its offset."""

TOMBSTONE_OFFSETS: Final = 1000
"""How far a tombstone may be from its delete event; Debezium writes them one after another."""


@dataclass(frozen=True, slots=True)
class Payloads:
    """The payloads of a batch, ready to be decoded."""

    values: pa.Array
    deletes: Flags
    """The messages that delete their key."""
    empty: Flags
    """The messages without a payload, and so without an order value."""
    reasons: dict[int, str]
    """The reasons why messages cannot be opened, by row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRule:
    topic: str
    key: tuple[FieldPath, ...] = ()
    """The columns of the key; none if it is the key of the message."""
    order: FieldPath | None = None
    """The column that orders changes."""
    lifted: tuple[str, str] | None = None
    """A field of Debezium's envelope that becomes a column, and the name of the column."""
    delete_when: str = ""
    is_debezium: bool = False
    decodes: bool = True

    @classmethod
    def of(cls, settings: LandSettings, topic: str) -> ChangeRule:
        """Return the rule of a pipeline's settings for one of its topics."""
        field = settings.order_by.strip()
        order = order_column(field, is_debezium=settings.decode == DEBEZIUM)
        lifted = (field, order) if field != order else None
        return cls(
            topic=topic,
            key=tuple(_parse_path(name) for name in settings.key_fields),
            order=_parse_path(order) if order else None,
            lifted=lifted,
            delete_when=settings.delete_when,
            is_debezium=settings.decode == DEBEZIUM,
            decodes=settings.decode != NO_DECODING,
        )

    @property
    def stored_key(self) -> tuple[FieldPath, ...]:
        return self.key or (("key",),)

    @property
    def ignores_tombstones(self) -> bool:
        return self.is_debezium and self.order is not None

    def open(self, batch: pa.RecordBatch) -> Payloads:
        """Return the payloads to decode, one per message of a partition."""
        values = batch.column("value")
        empty = deletes = np.asarray(pc.is_null(values).to_numpy(zero_copy_only=False))
        reasons: dict[int, str] = {}
        if self.is_debezium:
            values, deletes, reasons = self._open_envelopes(batch)
        elif self.key and deletes.any():
            rows = np.flatnonzero(deletes)
            documents = [self._key_document(key) for key in batch.column("key").take(pa.array(rows)).to_pylist()]
            values = pc.replace_with_mask(values, pa.array(deletes), pa.array(documents, pa.binary()))
        if self.delete_when:
            at = batch.schema.get_field_index("value")
            deletes = deletes | condition_matches(self.delete_when, batch.set_column(at, "value", values), self.topic)
        return Payloads(values, deletes, empty, reasons)

    def _open_envelopes(self, batch: pa.RecordBatch) -> tuple[pa.Array, Flags, dict[int, str]]:
        values: list[bytes | None] = []
        deletes = np.zeros(len(batch), np.bool_)
        reasons: dict[int, str] = {}
        messages = zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True)
        for row, (key, value) in enumerate(messages):
            try:
                document, deletes[row] = self._row(key, value)
                values.append(document)
            except (msgspec.MsgspecError, _InvalidChange) as error:
                values.append(_EMPTY)
                reasons[row] = f"the payload is not a change event of Debezium: {error}"
        return pa.array(values, pa.binary()), deletes, reasons

    def _row(self, key: bytes | None, value: bytes | None) -> tuple[bytes, bool]:
        """Return the row of one change event as JSON, and whether it is deleted."""
        if value is None:
            return self._key_document(key) or _EMPTY, True
        event = _event(value)
        is_delete = event.op == "d"
        if is_delete:
            row = _object(event.before) or self._key_document(key) or _EMPTY
        elif event.op in ("c", "u", "r"):
            after = _object(event.after)
            if after is None:
                raise _InvalidChange(f"op is {event.op!r}, and there is no `after`")
            row = after
        else:
            raise _InvalidChange(f"op is {event.op!r}; rows come with c, u, r and d")
        if self.lifted is not None:
            row = _with_field(row, self.lifted[1], _read_field(event, self.lifted[0]))
        return row, is_delete

    def _key_document(self, key: bytes | None) -> bytes | None:
        """Return the fields of `key` that a message key holds: an object, or the value of the only field."""
        if key is None or not self.key:
            return None
        document = _object_in_key(key)
        if document is not None or len(self.key) > 1:
            return document
        value = _plain_value(key)
        if value is None:
            return None
        for name in reversed(self.key[0]):
            value = b"{" + msgspec.json.encode(name) + b":" + value + b"}"
        return value

    def apply(
        self, batch: pa.RecordBatch, rows: pa.RecordBatch, opened: Payloads, reasons: pa.Array, deleted: Deleted
    ) -> tuple[pa.RecordBatch, pa.Array, Flags]:
        """Add key, order value and deletion to the decoded rows of messages.

        Return them with the reasons for those that do not fit, and which rows are changes of the table. `deleted` is
        updated to the end of the batch.
        """
        whole = pa.StructArray.from_arrays(rows.columns, names=rows.schema.names)
        keys = self._keys(whole)
        order = self._order(whole)
        name = ", ".join(map(path_text, self.key))
        no_key = f"the key {name} is missing or null" if self.key else "the message has no key"
        why = _first_reason(self._without_rounded(whole, reasons), pc.is_null(keys), no_key)
        if self.order is not None:
            missing = f"{path_text(self.order)}{NO_ORDER}"
            why = _first_reason(why, pc.and_(pc.is_null(order), pa.array(~opened.empty)), missing)
        if opened.reasons:
            texts = [opened.reasons.get(row) for row in range(len(rows))]
            why = pc.coalesce(pa.array(texts, pa.string()), why)
        changes = (
            rows.append_column(KEY, keys)
            .append_column(ORDER, order)
            .append_column(DELETED, pa.array(opened.deletes, pa.bool_()))
        )
        is_change = np.asarray(pc.is_null(why).to_numpy(zero_copy_only=False))
        if self.ignores_tombstones:
            ignored = self._ignored(batch, opened, is_change, deleted)
            why = pc.if_else(pa.array(ignored), pa.scalar(None, pa.string()), why)
            is_change = is_change & ~ignored
        return changes, why, is_change

    def _ignored(self, batch: pa.RecordBatch, opened: Payloads, is_change: Flags, deleted: Deleted) -> Flags:
        """Return which messages are tombstones that follow their delete event, which has the order value.

        A delete event that goes to the quarantine deletes nothing, so its tombstone has to.
        """
        ignored = np.zeros(len(batch), np.bool_)
        offset = 0
        messages = zip(batch.column("offset").to_pylist(), batch.column("key").to_pylist(), strict=True)
        for row, (offset, key) in enumerate(messages):
            if opened.empty[row]:
                ignored[row] = key in deleted and offset - deleted[key] <= TOMBSTONE_OFFSETS
            elif opened.deletes[row] and is_change[row]:
                deleted[key] = offset
            else:
                deleted.pop(key, None)
        for key in [key for key, at in deleted.items() if offset - at > TOMBSTONE_OFFSETS]:
            del deleted[key]
        return ignored

    def _without_rounded(self, rows: pa.StructArray, reasons: pa.Array) -> pa.Array:
        """Add a reason to rows with a key or an order value that may have been rounded, so that others equal it."""
        order = [] if self.order is None else [(self.order, "order.by")]
        for place, setting in [*((name, "key") for name in self.key), *order]:
            column = self._column(rows, place, setting)
            if column is not None and pa.types.is_floating(column.type):
                is_rounded = pc.greater_equal(pc.abs(column), float(EXACT_MAX)).fill_null(False)
                reasons = _first_reason(reasons, is_rounded, f"{path_text(place)}{_ROUNDED}")
        return reasons

    def _keys(self, rows: pa.StructArray) -> pa.Array:
        columns = [self._column(rows, place, "key") for place in self.stored_key]
        return canonical_keys([pa.nulls(len(rows), pa.binary()) if column is None else column for column in columns])

    def _order(self, rows: pa.StructArray) -> pa.Array:
        column = None if self.order is None else self._column(rows, self.order, "order.by")
        return pa.nulls(len(rows), pa.int64()) if column is None else column

    def _column(self, rows: pa.StructArray, place: FieldPath, setting: str) -> pa.Array | None:
        values = values_at(rows, (column_of(place[0]) if self.key or setting != "key" else place[0], *place[1:]))
        if values is not None and (pa.types.is_nested(values.type) or pa.types.is_boolean(values.type)):
            raise InvalidSetting(f"`{setting}` names {path_text(place)}, which is {values.type}; name a plain field")
        return values


class _InvalidChange(Exception):
    """The reason why an event changes no row."""


class _Event(msgspec.Struct):
    """The parts of an envelope, unparsed where possible."""

    op: str | None = None
    before: msgspec.Raw = msgspec.Raw(_NO_VALUE)
    after: msgspec.Raw = msgspec.Raw(_NO_VALUE)
    payload: msgspec.Raw = msgspec.Raw(_NO_VALUE)
    source: msgspec.Raw = msgspec.Raw(_NO_VALUE)
    transaction: msgspec.Raw = msgspec.Raw(_NO_VALUE)
    ts_ms: msgspec.Raw = msgspec.Raw(_NO_VALUE)
    ts_us: msgspec.Raw = msgspec.Raw(_NO_VALUE)
    ts_ns: msgspec.Raw = msgspec.Raw(_NO_VALUE)


_events: Final = msgspec.json.Decoder(_Event)
_documents: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _event(value: bytes) -> _Event:
    """Parse an envelope, with or without its schema."""
    event = _events.decode(value)
    if event.op is None and _object(event.payload) is not None:
        event = _events.decode(event.payload)
    if event.op is None:
        raise _InvalidChange("it has no `op`")
    return event


def _object(raw: msgspec.Raw) -> bytes | None:
    """Return the text of an object; None for null; raise `_InvalidChange` for anything else."""
    text = bytes(raw).strip()
    if text == _NO_VALUE:
        return None
    if not text.startswith(b"{"):
        raise _InvalidChange("a row is an object")
    return text


def _read_field(event: _Event, path: str) -> bytes:
    """Return the JSON of a field of the envelope."""
    name, _, rest = path.partition(".")
    raw: Any = getattr(event, name, msgspec.Raw(_NO_VALUE))
    if not rest:
        return bytes(raw)
    if bytes(raw) == _NO_VALUE:
        return _NO_VALUE
    return bytes(_documents.decode(raw).get(rest, msgspec.Raw(_NO_VALUE)))


def _with_field(row: bytes, name: str, value: bytes) -> bytes:
    """Add a field to the text of an object."""
    rest = row.lstrip()[1:]
    comma = b"" if rest.strip() == b"}" else b","
    return b'{"' + name.encode() + b'":' + value + comma + rest


def _plain_value(key: bytes) -> bytes | None:
    """Return a message key that is a number or text as JSON; None for anything else."""
    try:
        value = msgspec.json.decode(key)
    except msgspec.MsgspecError:
        try:
            text = key.decode()
        except UnicodeDecodeError:
            return None
        # A key in a binary format may happen to be valid UTF-8.
        return msgspec.json.encode(text) if text.isprintable() else None
    return None if value is None or isinstance(value, bool | list | dict) else key


def _object_in_key(key: bytes) -> bytes | None:
    """Return the object in a message key, with or without its schema; None if it is not an object."""
    try:
        fields = _documents.decode(key)
    except msgspec.MsgspecError:
        return None
    inner = fields.get("payload")
    if "schema" in fields and inner is not None and bytes(inner).startswith(b"{"):
        return bytes(inner)
    return key


def _first_reason(reasons: pa.Array, is_wrong: pa.Array, text: str) -> pa.Array:
    """Add a reason to rows that have none yet."""
    wrong = pc.and_(is_wrong, pc.is_null(reasons))
    return pc.if_else(wrong, pa.scalar(text, pa.string()), reasons) if pc.any(wrong).as_py() else reasons


def _parse_path(dotted: str) -> FieldPath:
    """Return the path that a dotted name means."""
    return tuple(dotted.split("."))
