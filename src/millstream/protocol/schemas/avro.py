"""Avro schemas: parsing with references, Java's canonical text, and Avro's rules of schema resolution.

Decisions are those of Avro's own SchemaCompatibility, which Confluent's registry asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from millstream.protocol.schemas.formats import DEPTH_MAX, Difference, InvalidSchema, read_json, write_json

PRIMITIVES: Final = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
NAMED: Final = frozenset({"record", "error", "enum", "fixed"})
_PROMOTIONS: Final = {
    "long": ("int",),
    "float": ("int", "long"),
    "double": ("int", "long", "float"),
    "bytes": ("string",),
    "string": ("bytes",),
}
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_TYPE_KEYS: Final = {
    "record": {"type", "name", "namespace", "doc", "fields", "aliases"},
    "error": {"type", "name", "namespace", "doc", "fields", "aliases"},
    "enum": {"type", "name", "namespace", "doc", "symbols", "default", "aliases"},
    "fixed": {"type", "name", "namespace", "doc", "size", "aliases"},
    "array": {"type", "items"},
    "map": {"type", "values"},
}
_FIELD_KEYS: Final = {"name", "type", "doc", "default", "order", "aliases"}
_INT_MAX, _LONG_MAX = 2**31 - 1, 2**63 - 1
_MISSING: Final = object()


@dataclass(slots=True, eq=False)
class AvroField:
    name: str
    type: AvroType
    doc: str | None = None
    default: Any = _MISSING
    order: str = "ascending"
    aliases: tuple[str, ...] = ()
    properties: dict[str, Any] = field(default_factory=dict)

    @property
    def has_default(self) -> bool:
        """Whether readers can fill it in if it is missing."""
        return self.default is not _MISSING


@dataclass(slots=True, eq=False)
class AvroType:
    """A type; named types are shared by all their uses, so a schema may be recursive."""

    kind: str
    name: str = ""
    """The full name of a named type."""
    doc: str | None = None
    aliases: tuple[str, ...] = ()
    fields: list[AvroField] = field(default_factory=list)
    symbols: tuple[str, ...] = ()
    default_symbol: str | None = None
    size: int = 0
    inner: AvroType | None = None
    """The items of an array, the values of a map."""
    branches: list[AvroType] = field(default_factory=list)
    properties: dict[str, Any] = field(default_factory=dict)

    @property
    def simple_name(self) -> str:
        """The name without its namespace."""
        return self.name.rpartition(".")[2]

    @property
    def namespace(self) -> str:
        """The namespace of the name; empty if it has none."""
        return self.name.rpartition(".")[0]

    @property
    def label(self) -> str:
        """The name of a named type, the kind of any other."""
        return self.name or self.kind


class AvroSchema:
    def __init__(self, root: AvroType, names: Mapping[str, AvroType], foreign: frozenset[str]) -> None:
        self.root = root
        self.names = names
        self._foreign = foreign

    @classmethod
    def parse(cls, text: str, references: Sequence[tuple[str, str]] = ()) -> AvroSchema:
        """Parse a schema whose references, given as name and text, are in dependency order."""
        names: dict[str, AvroType] = {}
        for _name, referenced in references:
            _Parser(names).parse(_decode(referenced), "", 0)
        foreign = frozenset(names)
        return cls(_Parser(names).parse(_decode(text), "", 0), names, foreign)

    def canonical(self) -> str:
        """Return the text as Java's library prints it; referenced types stay references."""
        return write_json(_Printer(set(self._foreign)).type(self.root, ""))

    def normalized(self) -> str:
        """Return the same text for schemas that differ in the order of properties or in how names are written."""
        return write_json(_Printer(set(self._foreign), is_normal=True).type(self.root, ""))

    def resolved(self) -> str:
        """Return the text with the referenced types written out."""
        return write_json(_Printer(set()).type(self.root, ""))


def _decode(text: str) -> Any:
    stripped = text.strip()
    # Java's parser takes the bare name of a primitive type, too.
    return stripped if stripped in PRIMITIVES else read_json(text)


class _Parser:
    def __init__(self, names: dict[str, AvroType]) -> None:
        self._names = names

    def parse(self, source: Any, space: str, depth: int) -> AvroType:
        if depth > DEPTH_MAX:
            raise InvalidSchema(f"the schema is nested more than {DEPTH_MAX} levels deep")
        if isinstance(source, str):
            return self._find_named(source, space)
        if isinstance(source, list):
            return self._union(source, space, depth)
        if not isinstance(source, dict):
            raise InvalidSchema(f"not a type: {_excerpt(source)}")
        kind = source.get("type")
        if isinstance(kind, dict | list):
            return self.parse(kind, space, depth + 1)
        if not isinstance(kind, str):
            raise InvalidSchema(f"no type: {_excerpt(source)}")
        if kind in PRIMITIVES:
            return AvroType(kind, properties={key: value for key, value in source.items() if key != "type"})
        if kind in ("array", "map"):
            return self._container(kind, source, space, depth)
        if kind in NAMED:
            return self._declare(kind, source, space, depth)
        return self._find_named(kind, space)

    def _find_named(self, name: str, space: str) -> AvroType:
        if name in PRIMITIVES:
            return AvroType(name)
        kind = self._names.get(_full_name(name, space)) or self._names.get(name)
        if kind is None:
            raise InvalidSchema(f'undefined name: "{name}"')
        return kind

    def _union(self, source: list[Any], space: str, depth: int) -> AvroType:
        branches = [self.parse(branch, space, depth + 1) for branch in source]
        seen: set[str] = set()
        for branch in branches:
            if branch.kind == "union":
                raise InvalidSchema("a union contains another union")
            if branch.label in seen:
                raise InvalidSchema(f"a union contains {branch.label!r} twice")
            seen.add(branch.label)
        return AvroType("union", branches=branches)

    def _container(self, kind: str, source: dict[str, Any], space: str, depth: int) -> AvroType:
        key = "items" if kind == "array" else "values"
        if key not in source:
            raise InvalidSchema(f"the {kind} has no {key}: {_excerpt(source)}")
        return AvroType(kind, inner=self.parse(source[key], space, depth + 1), properties=_properties(kind, source))

    def _declare(self, kind: str, source: dict[str, Any], space: str, depth: int) -> AvroType:
        declared_name = source.get("name")
        if not isinstance(declared_name, str):
            raise InvalidSchema(f"the {kind} has no name: {_excerpt(source)}")
        own_space = source.get("namespace", space)
        name = _full_name(declared_name, own_space if isinstance(own_space, str) else space)
        _check_name(name)
        if name in self._names:
            raise InvalidSchema(f"can't redefine: {name}")
        made = AvroType(kind, name=name, doc=_text_or_none(source, "doc"), properties=_properties(kind, source))
        made.aliases = tuple(_full_name(alias, made.namespace) for alias in _texts(source, "aliases"))
        self._names[name] = made
        if kind == "enum":
            self._fill_enum(made, source)
        elif kind == "fixed":
            made.size = source.get("size", -1)
            if not isinstance(made.size, int) or isinstance(made.size, bool) or not 0 <= made.size <= _INT_MAX:
                raise InvalidSchema(f"the fixed type {name} has no valid size: {_excerpt(source.get('size'))}")
        else:
            self._fill_record(made, source, depth)
        return made

    def _fill_enum(self, made: AvroType, source: dict[str, Any]) -> None:
        symbols = source.get("symbols")
        if not isinstance(symbols, list):
            raise InvalidSchema(f"enum {made.name} has no symbols: {_excerpt(source)}")
        made.symbols = tuple(_texts(source, "symbols"))
        for symbol in made.symbols:
            if not _NAME.match(symbol):
                raise InvalidSchema(f"illegal symbol in enum {made.name}: {symbol}")
        if len(set(made.symbols)) != len(made.symbols):
            raise InvalidSchema(f"enum {made.name} has a symbol twice")
        made.default_symbol = _text_or_none(source, "default")
        if made.default_symbol is not None and made.default_symbol not in made.symbols:
            raise InvalidSchema(f"the default {made.default_symbol} of enum {made.name} is not one of its symbols")

    def _fill_record(self, made: AvroType, source: dict[str, Any], depth: int) -> None:
        fields = source.get("fields")
        if not isinstance(fields, list):
            raise InvalidSchema(f"record {made.name} has no fields: {_excerpt(source)}")
        seen: set[str] = set()
        for declared in fields:
            if not isinstance(declared, dict) or not isinstance(declared.get("name"), str) or "type" not in declared:
                raise InvalidSchema(f"a field of record {made.name} has no name or no type: {_excerpt(declared)}")
            name = declared["name"]
            if not _NAME.match(name):
                raise InvalidSchema(f"illegal initial character or character in a name: {name}")
            if name in seen:
                raise InvalidSchema(f"duplicate field {name} in record {made.name}")
            seen.add(name)
            made.fields.append(
                AvroField(
                    name=name,
                    type=self.parse(declared["type"], made.namespace, depth + 1),
                    doc=_text_or_none(declared, "doc"),
                    default=declared.get("default", _MISSING),
                    order=declared.get("order", "ascending"),
                    aliases=tuple(_texts(declared, "aliases")),
                    properties={key: value for key, value in declared.items() if key not in _FIELD_KEYS},
                )
            )
        for made_field in made.fields:
            if made_field.order not in ("ascending", "descending", "ignore"):
                raise InvalidSchema(
                    f"field {made_field.name} of {made.name} has an unknown order: {_excerpt(made_field.order)}"
                )
            if made_field.has_default and not _is_value(made_field.type, made_field.default, 0):
                raise InvalidSchema(
                    f"Invalid default for field {made_field.name}: "
                    f'{_excerpt(made_field.default)} not a "{made_field.type.label}"'
                )


def _properties(kind: str, source: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in source.items() if key not in _TYPE_KEYS[kind]}


def _full_name(name: str, space: str) -> str:
    return name if "." in name or not space else f"{space}.{name}"


def _check_name(name: str) -> None:
    for part in name.lstrip(".").split("."):
        if not _NAME.match(part):
            raise InvalidSchema(f"illegal initial character or character in a name: {name}")


def _text_or_none(source: Mapping[str, Any], key: str) -> str | None:
    value = source.get(key)
    return value if isinstance(value, str) else None


def _texts(source: Mapping[str, Any], key: str) -> Iterator[str]:
    values = source.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise InvalidSchema(f"{key} is not a list of texts: {_excerpt(values)}")
    return iter(values)


def _excerpt(value: Any) -> str:
    text = write_json(value)
    return text if len(text) <= 200 else text[:200] + "…"


def _is_value(kind: AvroType, value: Any, depth: int) -> bool:
    """Whether a default fits a type; that of a union may fit any of its branches."""
    if depth > DEPTH_MAX:
        raise InvalidSchema(f"a default is nested more than {DEPTH_MAX} levels deep")
    match kind.kind:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "int" | "long":
            limit = _INT_MAX if kind.kind == "int" else _LONG_MAX
            return isinstance(value, int) and not isinstance(value, bool) and -limit - 1 <= value <= limit
        case "float" | "double":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "bytes" | "string" | "enum" | "fixed":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list) and all(_is_value(_inner(kind), element, depth + 1) for element in value)
        case "map":
            return isinstance(value, dict) and all(
                _is_value(_inner(kind), element, depth + 1) for element in value.values()
            )
        case "union":
            return any(_is_value(branch, value, depth + 1) for branch in kind.branches)
    return isinstance(value, dict) and all(
        _is_value(field.type, value[field.name], depth + 1) if field.name in value else field.has_default
        for field in kind.fields
    )


def _inner(kind: AvroType) -> AvroType:
    if kind.inner is None:
        raise InvalidSchema(f"the {kind.kind} has no items")
    return kind.inner


class _Printer:
    """Writes types as Java's library does: each named type in full once, by its name afterwards."""

    def __init__(self, known: set[str], *, is_normal: bool = False) -> None:
        self._known = known
        self._is_normal = is_normal

    def type(self, kind: AvroType, space: str) -> Any:
        properties = kind.properties
        if self._is_normal:
            properties = dict(sorted(properties.items()))
        if kind.kind in PRIMITIVES:
            return {"type": kind.kind, **properties} if properties else kind.kind
        if kind.kind == "union":
            return [self.type(branch, space) for branch in kind.branches]
        if kind.kind in ("array", "map"):
            key = "items" if kind.kind == "array" else "values"
            return {"type": kind.kind, key: self.type(_inner(kind), space), **properties}
        if kind.name in self._known:
            return kind.simple_name if kind.namespace == space and not self._is_normal else kind.name
        self._known.add(kind.name)
        printed = self._head(kind, space)
        if kind.doc is not None:
            printed["doc"] = kind.doc
        if kind.kind == "enum":
            printed["symbols"] = list(kind.symbols)
            if kind.default_symbol is not None:
                printed["default"] = kind.default_symbol
        elif kind.kind == "fixed":
            printed["size"] = kind.size
        else:
            printed["fields"] = [self._field(field, kind.namespace) for field in kind.fields]
        printed.update(properties)
        if kind.aliases:
            printed["aliases"] = [_relative(alias, kind.namespace) for alias in kind.aliases]
        return printed

    def _head(self, kind: AvroType, space: str) -> dict[str, Any]:
        if self._is_normal:
            return {"type": kind.kind, "name": kind.name}
        head = {"type": kind.kind, "name": kind.simple_name}
        if kind.namespace != space:
            head["namespace"] = kind.namespace
        return head

    def _field(self, avro_field: AvroField, space: str) -> dict[str, Any]:
        printed: dict[str, Any] = {"name": avro_field.name, "type": self.type(avro_field.type, space)}
        if avro_field.doc is not None:
            printed["doc"] = avro_field.doc
        if avro_field.has_default:
            printed["default"] = avro_field.default
        if avro_field.order != "ascending":
            printed["order"] = avro_field.order
        if avro_field.aliases:
            printed["aliases"] = list(avro_field.aliases)
        printed.update(sorted(avro_field.properties.items()) if self._is_normal else avro_field.properties.items())
        return printed


def _relative(name: str, space: str) -> str:
    return name.removeprefix(f"{space}.") if space and name.rpartition(".")[0] == space else name


def compare(reader: AvroSchema, writer: AvroSchema) -> list[Difference]:
    """Return why the reader cannot read the writer's data; empty if it can."""
    return _Resolution().compare(reader.root, writer.root, "")


class _Resolution:
    """Avro's schema resolution. A pair of types that is being compared counts as compatible, so recursion ends."""

    def __init__(self) -> None:
        self._results: dict[tuple[int, int], list[Difference] | None] = {}

    def compare(self, reader: AvroType, writer: AvroType, path: str) -> list[Difference]:
        pair = (id(reader), id(writer))
        if pair in self._results:
            return self._results[pair] or []
        self._results[pair] = None
        differences = self._decide(reader, writer, path)
        self._results[pair] = differences
        return differences

    def _decide(self, reader: AvroType, writer: AvroType, path: str) -> list[Difference]:
        if writer.kind == "union":
            return self._from_union(reader, writer, path)
        if reader.kind == "union":
            if any(not self.compare(branch, writer, path) for branch in reader.branches):
                return []
            return [_missing_branch(path or "/", f"reader union lacking writer type: {writer.kind.upper()}")]
        if _family(reader) != _family(writer):
            if writer.kind in _PROMOTIONS.get(reader.kind, ()):
                return []
            return [_type_mismatch(path or "/", reader, writer)]
        if reader.kind in PRIMITIVES:
            return []
        if reader.kind in ("array", "map"):
            step = "items" if reader.kind == "array" else "values"
            return self.compare(_inner(reader), _inner(writer), f"{path}/{step}")
        differences = _compare_names(reader, writer, path)
        if reader.kind == "fixed":
            return differences + _compare_sizes(reader, writer, path)
        if reader.kind == "enum":
            return differences + _compare_symbols(reader, writer, path)
        return differences + self._fields(reader, writer, path)

    def _from_union(self, reader: AvroType, writer: AvroType, path: str) -> list[Difference]:
        differences: list[Difference] = []
        for index, branch in enumerate(writer.branches):
            reasons = self.compare(reader, branch, path)
            if reasons and reader.kind == "union":
                place = f"{path}/{index}"
                reasons = [_missing_branch(place, f"reader union lacking writer type: {branch.kind.upper()}")]
            differences += reasons
        return differences

    def _fields(self, reader: AvroType, writer: AvroType, path: str) -> list[Difference]:
        written = {field.name: field for field in writer.fields}
        differences: list[Difference] = []
        for index, reader_field in enumerate(reader.fields):
            place = f"{path}/fields/{index}"
            other = next(
                (written[name] for name in (reader_field.name, *reader_field.aliases) if name in written), None
            )
            if other is not None:
                differences += self.compare(reader_field.type, other.type, f"{place}/type")
            elif not reader_field.has_default:
                text = f"At {place}, a field without a default in the {{reader}} schema is not in the {{writer}} one"
                differences.append(Difference("READER_FIELD_MISSING_DEFAULT_VALUE", text, reader_field.name))
        return differences


def _family(kind: AvroType) -> str:
    return "record" if kind.kind == "error" else kind.kind


def _compare_names(reader: AvroType, writer: AvroType, path: str) -> list[Difference]:
    if reader.simple_name == writer.simple_name or writer.name in reader.aliases:
        return []
    text = f"At {path}/name, the {{reader}} schema has another name than the {{writer}} one"
    return [Difference("NAME_MISMATCH", text, f"{reader.name} instead of {writer.name}")]


def _compare_sizes(reader: AvroType, writer: AvroType, path: str) -> list[Difference]:
    if reader.size == writer.size:
        return []
    text = f"At {path}/size, the {{reader}} schema has another size than the {{writer}} one"
    return [Difference("FIXED_SIZE_MISMATCH", text, f"{reader.size} instead of {writer.size}")]


def _compare_symbols(reader: AvroType, writer: AvroType, path: str) -> list[Difference]:
    known = frozenset(reader.symbols)
    lacking = [symbol for symbol in writer.symbols if symbol not in known]
    if not lacking or reader.default_symbol is not None:
        return []
    listed = f"[{', '.join(lacking)}]"
    text = f"At {path}/symbols, the {{reader}} schema lacks symbols of the {{writer}} one: {listed}"
    return [Difference("MISSING_ENUM_SYMBOLS", text, listed)]


def _missing_branch(path: str, detail: str) -> Difference:
    text = f"At {path}, no branch of the {{reader}} schema's union reads one of the {{writer}} schema's"
    return Difference("MISSING_UNION_BRANCH", text, detail)


def _type_mismatch(path: str, reader: AvroType, writer: AvroType) -> Difference:
    text = f"At {path}, the {{reader}} schema has another type than the {{writer}} one"
    detail = f"{reader.kind} does not read {writer.kind}"
    return Difference("TYPE_MISMATCH", text, detail)
