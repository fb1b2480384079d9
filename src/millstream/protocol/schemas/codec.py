"""Encodes and decodes values by a schema. One codec per schema; it needs no compiler, only the compiled form of the
registry.

Decoded values are native Python types: dictionaries, lists, `datetime`, `Decimal`, `UUID`, names of enum symbols.
`from_json` converts JSON documents from HTTP or a terminal, which lack some of these types, so that they can be
encoded.
"""

from __future__ import annotations

import base64
import datetime
import io
import json
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, DecimalException
from functools import cached_property
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urljoin

import msgspec

from millstream.core.errors import SchemaMismatch
from millstream.core.schema import AVRO, JSON_SCHEMA
from millstream.protocol.schemas.framing import Framed, read_indexes, write_indexes

REASON_CHARACTERS_MAX: Final = 300
_PLAIN: Final[Mapping[str, Any]] = {}
_NAMED: Final[Mapping[str, Any]] = {"return_named_type": True, "return_named_type_override": True}
_AVRO_BYTES_MIN: Final = {"boolean": 1, "int": 1, "long": 1, "float": 4, "double": 8, "bytes": 1, "string": 1}
_EMPTY_VALUES_MAX: Final = 8
"""How many values without bytes each byte of an item may bring."""
_BACKTRACK_MAX: Final = 100_000
"""Steps of a regular expression; one that takes more does not match."""
_UNREADABLE: Final = (
    ArithmeticError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
"""The errors of decoders for malformed bytes, and of encoders for values that do not fit."""


class Codec(ABC):
    """Encodes and decodes values by one schema."""

    @abstractmethod
    def check(self, framed: Framed) -> None:
        """Raise `SchemaMismatch` unless the value decodes and satisfies the schema."""

    @abstractmethod
    def decode(self, framed: Framed) -> Any:
        """Return the value, or raise `SchemaMismatch`."""

    def decode_json(self, framed: Framed) -> bytes:
        """Return the value as JSON, or raise `SchemaMismatch`."""
        return to_json(self.decode(framed))

    @abstractmethod
    def encode(self, value: Any) -> bytes:
        """Return the bytes after the schema id, or raise `SchemaMismatch` if the value does not fit."""

    def from_json(self, document: Any) -> Any:
        """Convert a JSON document to the value that `encode` takes."""
        return document

    def check_readable(self, framed: Framed, reader: Codec) -> None:
        """Raise `SchemaMismatch` unless a value that was written with this schema can be read with another one."""
        if type(reader) is not type(self):
            raise SchemaMismatch("it was written with a schema of another type")
        reader.check(framed)


def codec_of(schema_type: str, compiled: str) -> Codec:
    """Return the codec for a schema, given as the registry compiled it (`formats.render`)."""
    if schema_type == AVRO:
        return AvroCodec(compiled)
    if schema_type == JSON_SCHEMA:
        return JsonCodec(compiled)
    return ProtobufCodec(compiled)


def to_json(value: Any) -> bytes:
    """Write a decoded value as JSON: times in RFC 3339, decimals as text, bytes in base 64, no number as "NaN"."""
    try:
        encoded = msgspec.json.encode(value)
        # The encoder writes null for what is not a number in JSON.
        return msgspec.json.encode(_with_named_floats(value)) if b"null" in encoded else encoded
    except (TypeError, ValueError):
        return json.dumps(_with_named_floats(value), default=str, ensure_ascii=False).encode()


def _with_named_floats(value: Any) -> Any:
    """Replace NaN and the infinities by their names in Protobuf's JSON mapping."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _with_named_floats(element) for key, element in value.items()}
    return [_with_named_floats(element) for element in value] if isinstance(value, list | tuple) else value


def _mismatch(what: str, error: BaseException) -> SchemaMismatch:
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    return SchemaMismatch(f"{what}: {reason}"[:REASON_CHARACTERS_MAX])


# -- Avro ---------------------------------------------------------------------------------------------------


class AvroCodec(Codec):
    """Avro's binary encoding, by fastavro."""

    def __init__(self, resolved: str) -> None:
        self.source: Any = json.loads(resolved)

    @cached_property
    def _schema(self) -> Any:
        return _parse_avro(self.source)

    @cached_property
    def _plain(self) -> Any:
        """The schema without logical types, whose values may exceed the range of Python's types."""
        return _parse_avro(_without_logical_types(self.source))

    @cached_property
    def _converter(self) -> Callable[[Any], Any]:
        return _AvroFromJson().converter(self.source, "")

    def check(self, framed: Framed) -> None:
        self._read(framed, self._plain)

    def check_readable(self, framed: Framed, reader: Codec) -> None:
        if not isinstance(reader, AvroCodec):
            raise SchemaMismatch("it was written with a schema of another type")
        self._read(framed, self._plain, reader._plain)

    def decode(self, framed: Framed) -> Any:
        return self._read(framed, self._schema)

    def decode_named(self, framed: Framed) -> Any:
        """Return the value, with the name of its type beside each value of a union of several named types."""
        return self._read(framed, self._schema, options=_NAMED)

    @cached_property
    def _shape(self) -> _AvroShape:
        return _AvroShape(self._plain)

    def _read(self, framed: Framed, schema: Any, reader: Any = None, options: Mapping[str, Any] = _PLAIN) -> Any:
        import fastavro
        from fastavro import _read_py

        if self._shape.holds_too_much:
            raise SchemaMismatch(
                "the Avro schema has an array or a map whose items consist of values that take no bytes, or a record "
                "in itself: a few bytes could take all memory"
            )
        # The compiled decoder overflows the stack of the process for values that are nested too deeply; this one does
        # not.
        decode = _read_py.schemaless_reader if self._shape.is_recursive else fastavro.schemaless_reader
        stream = io.BytesIO(framed.content)
        try:
            value = decode(stream, schema, reader, **options)
        except (*_UNREADABLE, fastavro.read.SchemaResolutionError) as error:
            raise _mismatch("it does not decode as Avro", error) from error
        remaining = len(framed.content) - stream.tell()
        if remaining:
            raise SchemaMismatch(f"{remaining} bytes are left after the value is decoded as Avro")
        return value

    def encode(self, value: Any) -> bytes:
        import fastavro

        stream = io.BytesIO()
        try:
            fastavro.schemaless_writer(stream, self._schema, value, strict_allow_default=True)
            # The writer encodes 4.5 as 4 and true as 1.
            fastavro.validate(value, self._schema)
        except fastavro.validation.ValidationError as error:
            datum, expected, field = error.errors[0]
            reason = f"{datum!r} on field {field} is not of type {expected}"
            raise SchemaMismatch(f"the value does not fit the Avro schema: {reason}"[:REASON_CHARACTERS_MAX]) from error
        except (*_UNREADABLE, AttributeError) as error:
            raise _mismatch("the value does not fit the Avro schema", error) from error
        return stream.getvalue()

    def from_json(self, document: Any) -> Any:
        try:
            return self._converter(document)
        except (*_UNREADABLE, AttributeError) as error:
            raise _mismatch("the value does not fit the Avro schema", error) from error


class _AvroSize(NamedTuple):
    """The size of a schema's values, compared with the number of values inside them that take no bytes."""

    bytes_min: int
    excess: int
    """How many of those values a value may have beyond `_EMPTY_VALUES_MAX` for each of its bytes; often negative."""


def _sized(bytes_min: int) -> _AvroSize:
    return _AvroSize(bytes_min, -_EMPTY_VALUES_MAX * bytes_min)


class _AvroShape:
    """The number of values that a few bytes may hold under a schema, as fastavro parses it."""

    def __init__(self, parsed: Any) -> None:
        self.is_recursive = False
        """Whether values may be nested in each other."""
        self.holds_too_much = False
        """Whether a few bytes may hold any number of values, or far more values than bytes."""
        self._sizes: dict[str, _AvroSize] = {name: _sized(size) for name, size in _AVRO_BYTES_MIN.items()}
        self._sizes["null"] = _AvroSize(0, 1)
        self._around: dict[str, int] = {}
        """The named types that are being examined, and in how many unions, arrays and maps each is."""
        self._depth = 0
        self._examine(parsed)
        # Again with the sizes of types that refer to themselves, which were not known inside them.
        self._examine(parsed)

    def _examine(self, schema: Any) -> _AvroSize:
        if isinstance(schema, str):
            return self._examine_named(schema)
        if isinstance(schema, list):
            branches = self._examine_within(schema)
            # The number of the branch takes a byte.
            return _AvroSize(1, max((branch.excess for branch in branches), default=0) - _EMPTY_VALUES_MAX)
        kind = schema["type"]
        if kind in ("record", "error"):
            return self._examine_record(schema)
        if kind in ("array", "map"):
            (item,) = self._examine_within([schema["items" if kind == "array" else "values"]])
            # The key of a map takes a byte.
            key_bytes = int(kind == "map")
            if not item.bytes_min + key_bytes or item.excess > _EMPTY_VALUES_MAX * key_bytes:
                self.holds_too_much = True
            return _sized(1)
        if kind in ("enum", "fixed"):
            size = self._sizes[schema["name"]] = _sized(1 if kind == "enum" else schema["size"])
            return size
        return self._examine(kind)

    def _examine_named(self, name: str) -> _AvroSize:
        if name in self._around:
            self.is_recursive = True
            self.holds_too_much = self.holds_too_much or self._around[name] == self._depth
        # A type inside itself is within a union, an array or a map of its own, which takes a byte at least.
        return self._sizes.get(name, _AvroSize(1, 0))

    def _examine_within(self, schemas: Sequence[Any]) -> list[_AvroSize]:
        """Examine the schemas of values that a byte or more precedes."""
        self._depth += 1
        examined = [self._examine(schema) for schema in schemas]
        self._depth -= 1
        return examined

    def _examine_record(self, schema: Mapping[str, Any]) -> _AvroSize:
        name = schema["name"]
        self._around[name] = self._depth
        sizes = [self._examine(field["type"]) for field in schema["fields"]]
        del self._around[name]
        size = _AvroSize(sum(size.bytes_min for size in sizes), sum(size.excess for size in sizes))
        self._sizes[name] = size
        return size


def _parse_avro(source: Any) -> Any:
    import fastavro

    try:
        # The registry has validated the schema; defaults are checked there as Java does.
        return fastavro.parse_schema(source, named_schemas={}, _ignore_default_error=True)
    except Exception as error:
        raise SchemaMismatch(f"fastavro does not read the schema: {error}"[:REASON_CHARACTERS_MAX]) from error


def _without_logical_types(source: Any) -> Any:
    if isinstance(source, list):
        return [_without_logical_types(schema) for schema in source]
    if not isinstance(source, dict):
        return source
    plain = {key: value for key, value in source.items() if key != "logicalType"}
    for key in ("type", "items", "values"):
        if key in plain:
            plain[key] = _without_logical_types(plain[key])
    if isinstance(plain.get("fields"), list):
        plain["fields"] = [_without_logical_types(field) for field in plain["fields"]]
    return plain


def _as_bytes(value: Any) -> Any:
    # Avro's own JSON encoding: one character per byte.
    return value.encode("latin-1") if isinstance(value, str) else value


def _as_decimal(value: Any) -> Any:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            return Decimal(str(value))
        except DecimalException as error:
            raise ValueError(f"{value!r} is not a number") from error
    return value


def _as_date(value: Any) -> Any:
    return datetime.date.fromisoformat(value) if isinstance(value, str) else value


def _as_time(value: Any) -> Any:
    return datetime.time.fromisoformat(value) if isinstance(value, str) else value


def _as_instant(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    parsed = datetime.datetime.fromisoformat(value)
    return parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=datetime.UTC)


def _as_local_time(value: Any) -> Any:
    return datetime.datetime.fromisoformat(value).replace(tzinfo=None) if isinstance(value, str) else value


_LOGICAL: Final[Mapping[str, Callable[[Any], Any]]] = {
    "decimal": _as_decimal,
    "date": _as_date,
    "time-millis": _as_time,
    "time-micros": _as_time,
    "timestamp-millis": _as_instant,
    "timestamp-micros": _as_instant,
    "local-timestamp-millis": _as_local_time,
    "local-timestamp-micros": _as_local_time,
}


class _AvroFromJson:
    """Builds functions that convert JSON documents to what fastavro takes; recursive schemas refer to themselves."""

    def __init__(self) -> None:
        self._named: dict[str, Callable[[Any], Any]] = {}

    def converter(self, source: Any, space: str) -> Callable[[Any], Any]:
        if isinstance(source, list):
            return self._union(source, space)
        if isinstance(source, str):
            name = source if "." in source or not space else f"{space}.{source}"
            if source == "bytes":
                return _as_bytes
            if name not in self._named and source not in self._named:
                return _identity
            # Looked up when it is used: a recursive type is not complete yet.
            return lambda value: self._named[name if name in self._named else source](value)
        logical = _LOGICAL.get(source.get("logicalType", ""))
        if logical is not None:
            self._name(source, space, logical)
            return logical
        kind = source["type"]
        if kind in ("record", "error"):
            return self._record(source, space)
        if kind == "array":
            inner = self.converter(source["items"], space)
            return lambda value: [inner(element) for element in value] if isinstance(value, list) else value
        if kind == "map":
            inner = self.converter(source["values"], space)
            return lambda value: (
                {key: inner(element) for key, element in value.items()} if isinstance(value, dict) else value
            )
        if kind in ("enum", "fixed"):
            self._name(source, space, _as_bytes if kind == "fixed" else _identity)
            return _as_bytes if kind == "fixed" else _identity
        return self.converter(kind, space)

    def _name(self, source: Mapping[str, Any], space: str, convert: Callable[[Any], Any]) -> str:
        if "name" not in source:
            return space
        name, own = source["name"], source.get("namespace", space)
        full = name if "." in name or not own else f"{own}.{name}"
        self._named[full] = convert
        return full.rpartition(".")[0]

    def _record(self, source: Mapping[str, Any], space: str) -> Callable[[Any], Any]:
        fields: dict[str, Callable[[Any], Any]] = {}

        def convert(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            return {key: fields.get(key, _identity)(element) for key, element in value.items()}

        inside = self._name(source, space, convert)
        fields.update({field["name"]: self.converter(field["type"], inside) for field in source["fields"]})
        return convert

    def _union(self, branches: Sequence[Any], space: str) -> Callable[[Any], Any]:
        converters = [self.converter(branch, space) for branch in branches if branch != "null"]
        if len(converters) == 1:
            return lambda value: None if value is None else converters[0](value)
        # Which branch is meant is decided by fastavro, by the value's type.
        return _identity


def _identity(value: Any) -> Any:
    return value


# -- JSON Schema --------------------------------------------------------------------------------------------


class JsonCodec(Codec):
    """JSON documents, validated by jsonschema-rs."""

    def __init__(self, compiled: str) -> None:
        self.source, self.documents = json.loads(compiled)

    @cached_property
    def _validator(self) -> Any:
        import jsonschema_rs

        known = _documents_by_uri(self.source, self.documents)

        def retrieve(uri: str) -> Any:
            if uri not in known:
                raise LookupError(f"the schema refers to {uri}, which is not among its references")
            return known[uri]

        try:
            return jsonschema_rs.validator_for(
                self.source,
                retriever=retrieve,
                pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=_BACKTRACK_MAX),
            )
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
            raise _mismatch("the JSON Schema cannot be used", error) from error

    def invalid_pattern(self) -> str | None:
        """Describe a regular expression of the schema that no validator reads, or return None."""
        import jsonschema_rs

        try:
            _ = self._validator
        except SchemaMismatch as error:
            cause: Any = error.__cause__
            kind = getattr(cause, "kind", None)
            if isinstance(kind, jsonschema_rs.ValidationErrorKind.Format):
                return f"at '#/{'/'.join(map(str, cause.instance_path))}': {cause.message}"[:REASON_CHARACTERS_MAX]
        return None

    def referred(self, reference: str) -> Any:
        """Return the schema that a `$ref` names; true, which allows everything, if it is not found."""
        target, _, pointer = reference.partition("#")
        document: Any = self.source if not target else _documents_by_uri(self.source, self.documents).get(target, True)
        for step in filter(None, pointer.split("/")):
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            document = document.get(name, True) if isinstance(document, dict) else True
        return document

    def check(self, framed: Framed) -> None:
        self.decode(framed)

    def decode(self, framed: Framed) -> Any:
        try:
            value = msgspec.json.decode(framed.content)
        except (ValueError, RecursionError) as error:
            raise _mismatch("the content is not JSON", error) from error
        self._validate(value)
        return value

    def encode(self, value: Any) -> bytes:
        try:
            content = msgspec.json.encode(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise _mismatch("the value cannot be written as JSON", error) from error
        self._validate(msgspec.json.decode(content))
        return content

    def _validate(self, value: Any) -> None:
        import jsonschema_rs

        try:
            self._validator.validate(value)
        except jsonschema_rs.ValidationError as error:
            place = "/".join(str(step) for step in error.instance_path)
            raise SchemaMismatch(f"at '/{place}': {error.message}"[:REASON_CHARACTERS_MAX]) from error
        except (ValueError, RecursionError) as error:
            raise _mismatch("it cannot be validated", error) from error


def _documents_by_uri(source: Any, documents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the referenced documents by every URI under which a validator may ask for them."""
    base = source.get("$id", source.get("id", "")) if isinstance(source, dict) else ""
    known: dict[str, Any] = {}
    for name, document in documents.items():
        own = document.get("$id", document.get("id")) if isinstance(document, dict) else None
        for uri in (name, f"json-schema:///{name.lstrip('/')}", urljoin(str(base), name), own):
            if isinstance(uri, str):
                known.setdefault(uri.removesuffix("#"), document)
    return known


# -- Protobuf -----------------------------------------------------------------------------------------------

_WRAPPERS: Final = frozenset(
    f"google.protobuf.{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)
_DYNAMIC: Final = frozenset(f"google.protobuf.{name}" for name in ("Struct", "Value", "ListValue"))
_NANOS_PER_MICRO: Final = 1000


class ProtobufCodec(Codec):
    """Protobuf's binary encoding, by Google's library."""

    def __init__(self, compiled: str) -> None:
        from google.protobuf import descriptor_pb2, descriptor_pool

        files = descriptor_pb2.FileDescriptorSet.FromString(base64.b64decode(compiled)).file
        self._pool = descriptor_pool.DescriptorPool()
        for file in files:
            self._pool.Add(file)
        self.file = files[-1]
        self._classes: dict[tuple[int, ...], Any] = {}

    def message_class(self, indexes: tuple[int, ...] = (0,)) -> Any:
        """Return the class of a message; raise `SchemaMismatch` if the file has none there."""
        known_class = self._classes.get(indexes)
        if known_class is None:
            from google.protobuf.message_factory import GetMessageClass

            declared: Any = self.file.message_type
            name = self.file.package
            for index in indexes:
                if not 0 <= index < len(declared):
                    raise SchemaMismatch(f"the Protobuf file has no message at index {list(indexes)}")
                name = f"{name}.{declared[index].name}" if name else declared[index].name
                declared = declared[index].nested_type
            known_class = self._classes[indexes] = GetMessageClass(self._pool.FindMessageTypeByName(name))
        return known_class

    def message_indexes(self) -> dict[str, tuple[int, ...]]:
        """Return the path of each message by full name; nested messages follow those that contain them."""
        found: dict[str, tuple[int, ...]] = {}
        around: list[tuple[str, tuple[int, ...], Any]] = [(self.file.package, (), self.file.message_type)]
        for place, indexes, declared in around:
            for at, declared_field in enumerate(declared):
                name = f"{place}.{declared_field.name}" if place else declared_field.name
                found[name] = (*indexes, at)
                around.append((name, found[name], declared_field.nested_type))
        return found

    def parse(self, framed: Framed) -> Any:
        from google.protobuf.message import DecodeError

        if framed.indexes is not None:
            indexes, at = read_indexes(framed.indexes)[0], 0
        else:
            indexes, at = read_indexes(framed.content)
        kind = self.message_class(indexes)
        try:
            return kind.FromString(framed.content[at:])
        except (DecodeError, *_UNREADABLE) as error:
            raise _mismatch("it does not decode as Protobuf", error) from error

    def check(self, framed: Framed) -> None:
        self.parse(framed)

    def decode(self, framed: Framed) -> Any:
        return message_value(self.parse(framed))

    def decode_json(self, framed: Framed) -> bytes:
        """Return Protobuf's JSON mapping, with fields that have their default; the plain value where it has none."""
        from google.protobuf import json_format

        message = self.parse(framed)
        try:
            shown = json_format.MessageToDict(
                message, always_print_fields_with_no_presence=True, descriptor_pool=self._pool
            )
        except (json_format.Error, *_UNREADABLE):
            # An `Any` of an unknown type, for example.
            shown = message_value(message)
        return to_json(shown)

    def encode(self, value: Any) -> bytes:
        from google.protobuf.message import EncodeError

        try:
            return write_indexes((0,)) + bytes(self.message_class()(**value).SerializeToString())
        except (EncodeError, *_UNREADABLE, AttributeError) as error:
            raise _mismatch("the value does not fit the Protobuf schema", error) from error

    def from_json(self, document: Any) -> Any:
        from google.protobuf import json_format

        try:
            parsed = json_format.ParseDict(document, self.message_class()(), descriptor_pool=self._pool)
        except (json_format.ParseError, *_UNREADABLE, AttributeError) as error:
            raise _mismatch("the value does not fit the Protobuf schema", error) from error
        return {field.name: getattr(parsed, field.name) for field, _ in parsed.ListFields()}


def message_value(message: Any) -> Any:
    """Convert a Protobuf message: known types to Python's, enums to names, everything else to dictionaries."""
    name = message.DESCRIPTOR.full_name
    if name == "google.protobuf.Timestamp":
        micros = message.seconds * 1_000_000 + message.nanos // _NANOS_PER_MICRO
        try:
            return datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(microseconds=micros)
        except OverflowError as error:
            raise SchemaMismatch("a timestamp is outside the years 1 to 9999") from error
    if name in _WRAPPERS:
        return message.value
    if name in _DYNAMIC:
        from google.protobuf import json_format

        return json_format.MessageToDict(message)
    if name == "confluent.type.Decimal":
        return Decimal(int.from_bytes(message.value, "big", signed=True)).scaleb(-message.scale)
    return {
        field.name: _field_value(message, field) for field in message.DESCRIPTOR.fields if _is_shown(message, field)
    }


def _is_shown(message: Any, field: Any) -> bool:
    return field.containing_oneof is None or not field.has_presence or bool(message.HasField(field.name))


def _field_value(message: Any, field: Any) -> Any:
    value = getattr(message, field.name)
    if is_map(field):
        inner = field.message_type.fields_by_name["value"]
        return {key: _single_value(value[key], inner) for key in value}
    if is_repeated(field):
        return [_single_value(element, field) for element in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _single_value(value, field)


def _single_value(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return message_value(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        # proto3 keeps the numbers of symbols that it does not know.
        return known.name if known is not None else str(value)
    return value


def is_repeated(field: Any) -> bool:
    """Whether a Protobuf field is a list or a map."""
    return bool(field.is_repeated)


def is_map(field: Any) -> bool:
    return is_repeated(field) and field.message_type is not None and field.message_type.GetOptions().map_entry
