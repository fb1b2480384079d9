"""Payloads as typed columns, by the schemas that they name, with one typed decoder per schema id; and back.

Integers are long and floating-point numbers double, as in tables of JSON payloads, so that the promotions that schema
evolution allows need no new column. Decimals, days and times keep their types; uuids and enums are text, maps are maps,
and records are structs. A union of several types is a struct with a field per type, of which one is set. A value that a
column cannot hold (a type that contains itself, a JSON Schema that leaves the type open) is text, its JSON.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, DecimalException
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from millstream.client.admin.schemas import SchemaClient
from millstream.client.schemas import RegisteredCodec, codecs_of
from millstream.core.errors import InvalidSetting, MillstreamError, SchemaMismatch, SchemaRegistryError
from millstream.core.topic import SCHEMA_VALUE
from millstream.pipelines.jobs.land.inference import joined_schemas
from millstream.pipelines.source.link import Link, link_to
from millstream.pipelines.source.options import ReadOptions
from millstream.protocol.private.schema_messages import GetSubjectRequest
from millstream.protocol.schemas.codec import (
    AvroCodec,
    JsonCodec,
    ProtobufCodec,
    is_map,
    is_repeated,
    to_json,
)
from millstream.protocol.schemas.formats import COMPILED
from millstream.protocol.schemas.framing import HEADERS, Framed, read_indexes, unframe
from millstream.protocol.wire.admin_requests import topic_configs
from millstream.protocol.wire.client import Client

Convert = Callable[[Any], Any]
PRECISION_MAX: Final = 38
DEPTH_MAX: Final = 12
"""Deeper values are text."""
PARTS_MAX: Final = 5000
ELEMENT: Final = "element"
VALUE: Final = "value"
"""The field of a schema that is not a record."""
TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
_SHOWN_MAX: Final = 60


@dataclass(frozen=True, slots=True)
class ConvertedType:
    """The type of a part of a schema, and how decoded values are converted where that is needed."""

    kind: pa.DataType
    convert: Convert | None = None


@dataclass(frozen=True, slots=True)
class TypedSchema:
    """The fields of a schema's payloads, and how they are read."""

    fields: pa.Schema
    read: Callable[[Framed], dict[str, Any]]
    message: str | None = None
    """The full name of the message type, with Protobuf."""


@dataclass(slots=True)
class ReadPayloads:
    """The payloads of a batch as dictionaries, with reasons for those that cannot be decoded."""

    rows: list[dict[str, Any]]
    reasons: list[str | None]
    schemas: list[tuple[int, pa.Schema]] = field(default_factory=list)
    """The fields of every schema that occurs, with its first row."""


def typed_schema(schema: RegisteredCodec, indexes: tuple[int, ...] = (0,)) -> TypedSchema:
    codec = schema.codec
    if isinstance(codec, AvroCodec):
        return _schema(_AvroTypes().type(codec.source, "", 0), codec.decode_named)
    if isinstance(codec, JsonCodec):
        return _schema(ConvertedType(_JsonTypes(codec).type(codec.source, 0)), codec.decode)
    if isinstance(codec, ProtobufCodec):
        return _of_protobuf(codec, indexes)
    raise SchemaMismatch("the schema has an unknown type")


class SchemaRows:
    """Decodes the payloads of one topic; schemas are fetched when they first occur."""

    def __init__(self, link: Link, topic: str, messages: Sequence[str] = ()) -> None:
        """With `messages`, Protobuf messages of other types get a reason instead of fields."""
        self._link = link
        self._messages = messages
        self._codecs = codecs_of(link.client)
        self._subject = f"{topic}-value"
        self._typed: dict[tuple[str, tuple[int, ...]], TypedSchema | str] = {}

    def read(self, values: pa.Array, headers: pa.Array | None) -> ReadPayloads:
        """Decode a column of payloads; a message without one has no fields, which is not an error."""
        listed = values.to_pylist()
        named = headers.to_pylist() if headers is not None else [None] * len(listed)
        read = ReadPayloads([], [])
        seen: dict[int, tuple[int, pa.Schema]] = {}
        for number, (value, head) in enumerate(zip(listed, named, strict=True)):
            row: dict[str, Any] = {}
            reason: str | None = None
            if value is not None:
                try:
                    framed = unframe(value, _schema_header(head) if head else None)
                except SchemaMismatch as error:
                    reason = str(error)
                else:
                    typed = self._typed_of(framed)
                    if isinstance(typed, str):
                        reason = f"schema {framed.named}: {typed}"
                    else:
                        seen.setdefault(id(typed), (number, typed.fields))
                        try:
                            self._check_message(typed.message)
                            row = typed.read(framed)
                        except SchemaMismatch as error:
                            reason = f"schema {framed.named}: {error}"
            read.rows.append(row)
            read.reasons.append(reason)
        read.schemas = list(seen.values())
        return read

    def _check_message(self, name: str | None) -> None:
        if name is not None and self._messages and name not in self._messages:
            raise SchemaMismatch(
                f"it is a {name}, but the columns are those of {', '.join(self._messages)}; "
                f"the option schemaMessage={name} reads it"
            )

    def _typed_of(self, framed: Framed) -> TypedSchema | str:
        """Return the decoder of a schema, or why it has none."""
        place = (framed.named, ())
        known = self._typed.get(place)
        if known is None:
            try:
                found = self._link.call(self._codecs.named(framed, self._subject))
                if isinstance(found.codec, ProtobufCodec):
                    return self._of_message(framed, found)
                known = typed_schema(found)
            except (SchemaMismatch, SchemaRegistryError) as error:
                known = str(error)
            self._typed[place] = known
        return known

    def _of_message(self, framed: Framed, schema: RegisteredCodec) -> TypedSchema | str:
        """A Protobuf file has several messages, each with its own fields."""
        try:
            indexes = read_indexes(framed.content if framed.indexes is None else framed.indexes)[0]
            place = (framed.named, indexes)
            if place not in self._typed:
                self._typed[place] = typed_schema(schema, indexes)
            return self._typed[place]
        except SchemaMismatch as error:
            return str(error)


def _schema_header(headers: Sequence[Mapping[str, Any]]) -> bytes | None:
    contents: list[bytes] = [header["value"] for header in headers if header["key"] == HEADERS[VALUE]]
    return contents[-1] if contents else None


def payload_fields_of(options: ReadOptions) -> pa.Schema:
    """Return the fields that the schemas of a query's topics have, of all their versions."""
    return payload_of(options)[0]


def payload_of(options: ReadOptions) -> tuple[pa.Schema, list[str]]:
    """Return the fields, and the names of the Protobuf messages that have them: the option's, or the first ones."""
    link = link_to(options.brokers, client_id=options.client_id, timeout_s=options.timeout_s, access=options.access)
    if options.subject is None and options.pattern is not None:
        raise InvalidSetting("decode=schema with a pattern needs the option schemaSubject, or a schema of the query")
    topics = options.subscribe or tuple(options.assign or ())
    typed: list[TypedSchema] = link.call(_typed_by(link.client, topics, options))
    fields = joined_schemas([schema.fields for schema in typed])
    # A field that every version has as null could be anything.
    kept = pa.schema([field for field in fields if not pa.types.is_null(field.type)])
    return kept, sorted({schema.message for schema in typed if schema.message is not None})


async def _typed_by(client: Client, topics: Sequence[str], options: ReadOptions) -> list[TypedSchema]:
    schemas, subject, message = SchemaClient(client), options.subject, options.message
    subjects = [subject] if subject is not None else [await _subject_of(client, topic) for topic in topics]
    typed: list[TypedSchema] = []
    others: dict[str, tuple[int, ...]] = {}
    for subject_name in subjects:
        for number in (await schemas.subject(GetSubjectRequest(subject=subject_name))).versions:
            response = await schemas.subject(
                GetSubjectRequest(subject=subject_name, version=str(number), format=COMPILED)
            )
            if response.schema is not None:
                registered = RegisteredCodec(response.schema)
                codec = registered.codec
                indexes_by_name = codec.message_indexes() if isinstance(codec, ProtobufCodec) else {}
                if message is None or message in indexes_by_name:
                    typed.append(typed_schema(registered, indexes_by_name.get(message or "", (0,))))
                others |= indexes_by_name
    if message is not None and not typed:
        known = f"; there are: {', '.join(others)}" if others else ""
        raise InvalidSetting(f"no schema of {', '.join(subjects)} has a Protobuf message {message!r}{known}")
    return typed


async def _subject_of(client: Client, topic: str) -> str:
    """Return the subject that a topic's rule names, or the one that serializers use."""
    rule = (await topic_configs(client, topic)).get(SCHEMA_VALUE)
    return (rule.value if rule is not None else None) or f"{topic}-value"


def encode_values(link: Link, subject: str, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Encode the structs of the column `value` with the latest schema of a subject."""
    codecs = codecs_of(link.client)
    structs = batch.column(VALUE).to_pylist(maps_as_pydicts="strict")

    async def encode() -> list[bytes | None]:
        return [None if struct is None else await codecs.encode(subject, struct) for struct in structs]

    encoded: list[bytes | None] = link.call(encode())
    return batch.set_column(batch.schema.get_field_index(VALUE), VALUE, pa.array(encoded, pa.binary()))


# -- columns ------------------------------------------------------------------------------------------------


class ValueMismatch(MillstreamError):
    """A value does not fit its column."""


def columns_of(read: ReadPayloads, fields: pa.Schema) -> pa.StructArray:
    """Convert rows to columns; a row that does not fit gets a reason and no values."""
    fit = _fitter(pa.struct(list(fields)), "")
    rows: list[Any] = []
    for at, row in enumerate(read.rows):
        try:
            rows.append(fit(row) if row else {})
        except ValueMismatch as misfit:
            rows.append({})
            read.reasons[at] = read.reasons[at] or str(misfit)
    return pa.array(rows, pa.struct(list(fields)))


def _refuse(value: Any, kind: pa.DataType, path: str) -> ValueMismatch:
    shown = to_json(value).decode(errors="replace")
    return ValueMismatch(f"{path}: {shown[:_SHOWN_MAX]} does not fit the column's type {kind}")


def _fitter(kind: pa.DataType, path: str) -> Convert:
    """Return a function that converts decoded values to values for a column of this type."""
    if pa.types.is_struct(kind):
        parts = [(branch.name, branch.name.lower(), _fitter(branch.type, _join(path, branch.name))) for branch in kind]

        def fit_struct(value: Any) -> Any:
            if value is None:
                return None
            if not isinstance(value, dict):
                raise _refuse(value, kind, path)
            lower: dict[str, Any] | None = None
            fitted = {}
            for name, other, fit in parts:
                field_value = value.get(name)
                if field_value is None and name not in value:
                    lower = {key.lower(): element for key, element in value.items()} if lower is None else lower
                    field_value = lower.get(other)
                fitted[name] = None if field_value is None else fit(field_value)
            return fitted

        return fit_struct
    if pa.types.is_list(kind):
        fit_item = _fitter(kind.value_type, f"{path}[]")

        def fit_list(value: Any) -> Any:
            if not isinstance(value, list | tuple):
                raise _refuse(value, kind, path)
            return [None if element is None else fit_item(element) for element in value]

        return fit_list
    if pa.types.is_map(kind):
        fit_value = _fitter(kind.item_type, f"{path}{{}}")

        def fit_map(value: Any) -> Any:
            if not isinstance(value, dict):
                raise _refuse(value, kind, path)
            return [(str(key), None if element is None else fit_value(element)) for key, element in value.items()]

        return fit_map
    return _scalar_fitter(kind, path)


def _scalar_fitter(kind: pa.DataType, path: str) -> Convert:
    accept = next((convert for test, convert in _SCALARS if test(kind)), None)

    def fit(value: Any) -> Any:
        if value is None:
            return None
        try:
            fitted = None if accept is None else accept(value, kind)
        except (ValueError, OverflowError, DecimalException, TypeError, AttributeError) as error:
            raise _refuse(value, kind, path) from error
        if fitted is None:
            raise _refuse(value, kind, path)
        return fitted

    return fit


def _text(value: Any, _kind: pa.DataType) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, UUID | Decimal):
        return str(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return to_json(value).decode()


def _integer(value: Any, kind: pa.DataType) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal) or value != int(value):
        return None
    number, limit = int(value), 2 ** (kind.bit_width - 1)
    return number if -limit <= number < limit else None


def _double(value: Any, _kind: pa.DataType) -> float | None:
    return None if isinstance(value, bool | str) else float(value)


def _decimal(value: Any, kind: pa.DataType) -> Decimal | None:
    if isinstance(value, bool):
        return None
    number = value if isinstance(value, Decimal) else Decimal(str(value))
    exponent = number.as_tuple().exponent
    if not isinstance(exponent, int):
        return None
    rounded = number if -exponent <= kind.scale else number.quantize(Decimal(1).scaleb(-kind.scale))
    if rounded != number or rounded.adjusted() >= kind.precision - kind.scale:
        return None
    return rounded


def _day(value: Any, _kind: pa.DataType) -> datetime.date | None:
    if isinstance(value, str):
        return datetime.date.fromisoformat(value)
    return value if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime) else None


def _moment(value: Any, kind: pa.DataType) -> datetime.datetime | None:
    moment = datetime.datetime.fromisoformat(value) if isinstance(value, str) else value
    if not isinstance(moment, datetime.datetime):
        return None
    if kind.tz is None:
        return moment.replace(tzinfo=None)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)


def _binary(value: Any, _kind: pa.DataType) -> bytes | None:
    return value if isinstance(value, bytes) else None


def _boolean(value: Any, _kind: pa.DataType) -> bool | None:
    return value if isinstance(value, bool) else None


_SCALARS: Final[tuple[tuple[Callable[[pa.DataType], bool], Callable[[Any, pa.DataType], Any]], ...]] = (
    (pa.types.is_string, _text),
    (pa.types.is_boolean, _boolean),
    (pa.types.is_integer, _integer),
    (pa.types.is_floating, _double),
    (pa.types.is_decimal, _decimal),
    (pa.types.is_date, _day),
    (pa.types.is_timestamp, _moment),
    (pa.types.is_binary, _binary),
)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field(ELEMENT, kind))


def _struct(fields: Sequence[pa.Field]) -> pa.DataType:
    """Return a struct; text if it would have no fields, which no file format takes."""
    return pa.struct(fields) if fields else pa.string()


def _schema(typed: ConvertedType, read: Callable[[Framed], Any]) -> TypedSchema:
    """Return the decoder of a whole schema: its fields, or one field if it is not a record."""
    convert = typed.convert or _identity
    if pa.types.is_struct(typed.kind):
        return TypedSchema(pa.schema(list(typed.kind)), lambda framed: convert(read(framed)))
    return TypedSchema(pa.schema([pa.field(VALUE, typed.kind)]), lambda framed: {VALUE: convert(read(framed))})


def _identity(value: Any) -> Any:
    return value


# -- Avro ---------------------------------------------------------------------------------------------------

_AVRO: Final[Mapping[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "int": pa.int64(),
    "long": pa.int64(),
    "float": pa.float64(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
_AVRO_LOGICAL: Final[Mapping[str, pa.DataType]] = {
    "date": pa.date32(),
    "time-millis": pa.string(),
    "time-micros": pa.string(),
    "timestamp-millis": TIMESTAMP,
    "timestamp-micros": TIMESTAMP,
    # A time without a zone is not an instant, and tables have only instants.
    "local-timestamp-millis": pa.string(),
    "local-timestamp-micros": pa.string(),
    "uuid": pa.string(),
}
_PYTHON_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "boolean": (bool,),
    "int": (int,),
    "long": (int,),
    "float": (float,),
    "double": (float,),
    "bytes": (bytes, Decimal),
    "string": (str, UUID),
    "array": (list,),
    "map": (dict,),
}


class _Budget:
    """Bounds the parts of a schema, whose types may nest each other repeatedly; the rest is text."""

    def __init__(self) -> None:
        self._left = PARTS_MAX

    def is_spent(self) -> bool:
        """Count one part, and return whether that exceeds the budget."""
        self._left -= 1
        return self._left < 0


class _AvroTypes:
    def __init__(self) -> None:
        self._budget = _Budget()
        self._named: dict[str, Any] = {}
        self._open: set[str] = set()

    def type(self, source: Any, space: str, depth: int) -> ConvertedType:
        if self._budget.is_spent():
            return ConvertedType(pa.string(), _untagged)
        if isinstance(source, list):
            return self._union(source, space, depth)
        if isinstance(source, str):
            if source in _AVRO:
                return ConvertedType(_AVRO[source])
            if source == "null":
                return ConvertedType(pa.null())
            name = source if "." in source or not space else f"{space}.{source}"
            child = self._named.get(name, self._named.get(source))
            if child is None or name in self._open or source in self._open or depth > DEPTH_MAX:
                return ConvertedType(pa.string(), _untagged)
            return self.type(child, name.rpartition(".")[0], depth)
        kind = source["type"]
        if isinstance(kind, list | dict):
            return self.type(kind, space, depth)
        name = self._declare(source, space)
        logical = self._logical(source)
        if logical is not None:
            return ConvertedType(logical)
        if kind in ("record", "error"):
            return self._record(source, name, depth)
        if kind == "enum":
            return ConvertedType(pa.string())
        if kind == "fixed":
            return ConvertedType(pa.binary())
        if kind == "array":
            inner = self.type(source["items"], space, depth + 1)
            return ConvertedType(_list(inner.kind), None if inner.convert is None else _each_item(inner.convert))
        if kind == "map":
            inner = self.type(source["values"], space, depth + 1)
            kinds = pa.map_(pa.string(), inner.kind)
            return ConvertedType(kinds, None if inner.convert is None else _each_value(inner.convert))
        return self.type(kind, space, depth)

    def _declare(self, source: Mapping[str, Any], space: str) -> str:
        """Remember a named type; return its full name."""
        if "name" not in source:
            return space
        name, own = source["name"], source.get("namespace", space)
        full = name if "." in name or not own else f"{own}.{name}"
        self._named[full] = source
        return str(full)

    def _logical(self, source: Mapping[str, Any]) -> pa.DataType | None:
        logical = source.get("logicalType")
        if logical == "decimal" and source["type"] in ("bytes", "fixed"):
            precision, scale = source.get("precision", 0), source.get("scale", 0)
            fits = isinstance(precision, int) and isinstance(scale, int) and 0 < precision <= PRECISION_MAX
            return pa.decimal128(precision, scale) if fits and 0 <= scale <= precision else pa.string()
        return _AVRO_LOGICAL.get(str(logical)) if source["type"] in ("int", "long", "string") else None

    def _record(self, source: Mapping[str, Any], name: str, depth: int) -> ConvertedType:
        if depth > DEPTH_MAX or name in self._open:
            return ConvertedType(pa.string(), _untagged)
        self._open.add(name)
        space = name.rpartition(".")[0]
        parts = [(field["name"], self.type(field["type"], space, depth + 1)) for field in source["fields"]]
        self._open.discard(name)
        converts = {part: typed.convert for part, typed in parts if typed.convert is not None}
        kind = _struct([pa.field(part, typed.kind) for part, typed in parts if not pa.types.is_null(typed.kind)])

        def convert(value: Any) -> Any:
            record = _untag(value)
            return {**record, **{part: convert(record.get(part)) for part, convert in converts.items()}}

        return ConvertedType(kind, convert)

    def _union(self, branches: Sequence[Any], space: str, depth: int) -> ConvertedType:
        kept = [branch for branch in branches if branch != "null"]
        if not kept:
            return ConvertedType(pa.null())
        typed = [self.type(branch, space, depth if len(kept) == 1 else depth + 1) for branch in kept]
        if len(kept) == 1:
            convert = typed[0].convert
            return ConvertedType(typed[0].kind, None if convert is None else lambda value: _or_none(convert, value))
        kinds = {branch_type.kind for branch_type in typed}
        if kinds <= {pa.int64(), pa.float64()}:
            return ConvertedType(pa.float64() if pa.float64() in kinds else pa.int64())
        if kinds == {pa.string()}:
            return ConvertedType(pa.string(), _untagged)
        names = [self._branch(branch, space) for branch in kept]
        chosen = list(zip(names, kept, typed, strict=True))

        def choose(value: Any) -> Any:
            if value is None:
                return None
            for name, source, branch_type in chosen:
                if self._was_written_as(value, name, source, space):
                    inner = _untag(value)
                    return {
                        name.rpartition(".")[2]: inner if branch_type.convert is None else branch_type.convert(inner)
                    }
            return None

        fields = [pa.field(name.rpartition(".")[2], branch_type.kind) for name, _, branch_type in chosen]
        return ConvertedType(pa.struct(fields), choose)

    def _branch(self, source: Any, space: str) -> str:
        if isinstance(source, str):
            return source
        if "name" in source:
            name, own = source["name"], source.get("namespace", space)
            return str(name if "." in name or not own else f"{own}.{name}")
        return str(source["type"])

    def _was_written_as(self, value: Any, name: str, source: Any, space: str) -> bool:
        """Whether a value was written as a branch of a union; named types carry their name where that is in doubt."""
        if isinstance(value, tuple):
            return bool(value[0] == name or value[0] == f"{space}.{name}")
        kind = source if isinstance(source, str) else source["type"]
        if kind not in _PYTHON_TYPES:
            declared = self._named.get(name, self._named.get(f"{space}.{name}", {}))
            kind = declared.get("type", "record") if isinstance(declared, dict) else "record"
            kinds: tuple[type, ...] = {"enum": (str,), "fixed": (bytes, Decimal)}.get(kind, (dict,))
            return isinstance(value, kinds)
        if isinstance(source, dict) and source.get("logicalType"):
            return isinstance(value, (*_PYTHON_TYPES[kind], datetime.date, datetime.time))
        return isinstance(value, _PYTHON_TYPES[kind]) and isinstance(value, bool) == (kind == "boolean")


def _each_item(convert: Convert) -> Convert:
    return lambda value: [convert(element) for element in value]


def _each_value(convert: Convert) -> Convert:
    return lambda value: {key: convert(element) for key, element in value.items()}


def _or_none(convert: Convert, value: Any) -> Any:
    return None if value is None else convert(value)


def _untag(value: Any) -> Any:
    return value[1] if isinstance(value, tuple) else value


def _untagged(value: Any) -> Any:
    """Remove the names of types from a value that becomes text."""
    if isinstance(value, tuple):
        return _untagged(value[1])
    if isinstance(value, dict):
        return {key: _untagged(element) for key, element in value.items()}
    return [_untagged(element) for element in value] if isinstance(value, list) else value


# -- JSON Schema --------------------------------------------------------------------------------------------

_JSON: Final[Mapping[str, pa.DataType]] = {
    "string": pa.string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
    "null": pa.null(),
}


class _JsonTypes:
    def __init__(self, codec: JsonCodec) -> None:
        self._codec = codec
        self._budget = _Budget()
        self._open: set[str] = set()

    def type(self, raw: Any, depth: int) -> pa.DataType:
        """Return the type of a schema; text if it allows several, or refers to itself."""
        if not isinstance(raw, dict) or depth > DEPTH_MAX or self._budget.is_spent():
            return pa.string()
        reference = raw.get("$ref")
        if isinstance(reference, str):
            if reference in self._open:
                return pa.string()
            self._open.add(reference)
            field_type = self.type(self._codec.referred(reference), depth + 1)
            self._open.discard(reference)
            return field_type
        kinds = raw.get("type")
        listed = [kinds] if isinstance(kinds, str) else [kind for kind in kinds or () if kind != "null"]
        if not listed:
            return self._combined(raw, depth)
        if set(listed) == {"integer", "number"}:
            return pa.float64()
        if len(listed) > 1:
            return pa.string()
        if listed[0] == "array":
            items = raw.get("items")
            return _list(self.type(items, depth + 1)) if isinstance(items, dict) else _list(pa.string())
        if listed[0] == "object":
            return self._object(raw, depth)
        if listed[0] == "string" and raw.get("format") in ("date", "date-time"):
            return pa.date32() if raw["format"] == "date" else TIMESTAMP
        return _JSON.get(listed[0], pa.string())

    def _object(self, raw: Mapping[str, Any], depth: int) -> pa.DataType:
        properties = raw.get("properties")
        if isinstance(properties, dict) and properties:
            typed = [pa.field(name, self.type(property_, depth + 1)) for name, property_ in properties.items()]
            return _struct([field for field in typed if not pa.types.is_null(field.type)])
        rest = raw.get("additionalProperties")
        if isinstance(rest, dict) and rest:
            return pa.map_(pa.string(), self.type(rest, depth + 1))
        return pa.string()

    def _combined(self, raw: Mapping[str, Any], depth: int) -> pa.DataType:
        for name in ("anyOf", "oneOf", "allOf"):
            parts = raw.get(name)
            if isinstance(parts, list):
                kinds = [kind for part in parts if not pa.types.is_null(kind := self.type(part, depth + 1))]
                if len(kinds) == 1:
                    return kinds[0]
                if name == "allOf" and kinds and all(pa.types.is_struct(kind) for kind in kinds):
                    merged = {branch.name: branch for kind in kinds for branch in kind}
                    return pa.struct(list(merged.values()))
                return pa.string()
        if isinstance(raw.get("properties"), dict):
            return self._object(raw, depth)
        values = raw.get("enum", [raw["const"]] if "const" in raw else [])
        kinds_of_values = {type(value) for value in values if value is not None}
        if len(kinds_of_values) == 1:
            named = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
            return named.get(kinds_of_values.pop(), pa.string())
        return pa.string()


# -- Protobuf -----------------------------------------------------------------------------------------------

_UNSIGNED: Final = pa.decimal128(20, 0)
_PROTOBUF: Final[Mapping[int, pa.DataType]] = {
    **dict.fromkeys((1, 2), pa.float64()),
    **dict.fromkeys((3, 5, 7, 13, 15, 16, 17, 18), pa.int64()),
    **dict.fromkeys((4, 6), _UNSIGNED),
    8: pa.bool_(),
    9: pa.string(),
    12: pa.binary(),
    14: pa.string(),
}
"""Types by the number of a field's type in descriptors."""
_KNOWN_MESSAGES: Final[Mapping[str, pa.DataType]] = {
    "google.protobuf.Timestamp": TIMESTAMP,
    "google.protobuf.DoubleValue": pa.float64(),
    "google.protobuf.FloatValue": pa.float64(),
    "google.protobuf.Int64Value": pa.int64(),
    "google.protobuf.Int32Value": pa.int64(),
    "google.protobuf.UInt32Value": pa.int64(),
    "google.protobuf.UInt64Value": _UNSIGNED,
    "google.protobuf.BoolValue": pa.bool_(),
    "google.protobuf.StringValue": pa.string(),
    "google.protobuf.BytesValue": pa.binary(),
    "google.protobuf.Struct": pa.string(),
    "google.protobuf.Value": pa.string(),
    "google.protobuf.ListValue": pa.string(),
    "google.protobuf.Any": pa.string(),
    "confluent.type.Decimal": pa.string(),
}


def _of_protobuf(codec: ProtobufCodec, indexes: tuple[int, ...]) -> TypedSchema:
    descriptor = codec.message_class(indexes).DESCRIPTOR
    typed = _schema(ConvertedType(_ProtobufTypes().message(descriptor, frozenset(), 0)), codec.decode)
    return replace(typed, message=descriptor.full_name)


class _ProtobufTypes:
    def __init__(self) -> None:
        self._budget = _Budget()

    def message(self, descriptor: Any, outer: frozenset[str], depth: int) -> pa.DataType:
        name = descriptor.full_name
        if name in _KNOWN_MESSAGES:
            return _KNOWN_MESSAGES[name]
        if name in outer or depth > DEPTH_MAX:
            return pa.string()
        inside = outer | {name}
        return _struct([pa.field(field.name, self._field(field, inside, depth)) for field in descriptor.fields])

    def _field(self, described: Any, outer: frozenset[str], depth: int) -> pa.DataType:
        if self._budget.is_spent():
            return pa.string()
        if is_map(described):
            value = described.message_type.fields_by_name["value"]
            return pa.map_(pa.string(), self._single(value, outer, depth))
        kind = self._single(described, outer, depth)
        return _list(kind) if is_repeated(described) else kind

    def _single(self, described: Any, outer: frozenset[str], depth: int) -> pa.DataType:
        if described.message_type is not None:
            return self.message(described.message_type, outer, depth + 1)
        return _PROTOBUF[described.type]
