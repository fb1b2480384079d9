"""JSON Schema: parsing with references, canonical text, and compatibility.

A schema is first brought into a model in which each node constrains one type, with combinations in between; two models
are then compared as Confluent's registry does, whose rules about open and closed content models this follows: a reader
is compatible if every document that the writer's schema allows is one that the reader's schema allows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin

import jsonschema_rs
import re2

from millstream.protocol.schemas.formats import DEPTH_MAX, Difference, InvalidSchema, read_json, write_json

_KEYWORDS: Final = {
    "object": frozenset(
        [
            "properties",
            "required",
            "additionalProperties",
            "patternProperties",
            "minProperties",
            "maxProperties",
            "dependencies",
            "dependentRequired",
            "dependentSchemas",
            "unevaluatedProperties",
            "propertyNames",
        ]
    ),
    "array": frozenset(
        [
            "items",
            "prefixItems",
            "additionalItems",
            "minItems",
            "maxItems",
            "uniqueItems",
            "contains",
            "unevaluatedItems",
        ]
    ),
    "string": frozenset(["minLength", "maxLength", "pattern"]),
    "number": frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]),
}
_COMBINATIONS: Final = ("allOf", "anyOf", "oneOf")
_ANNOTATIONS: Final = (("title", "TITLE"), ("description", "DESCRIPTION"), ("default", "DEFAULT"))
_COMPATIBLE: Final = frozenset(
    [
        "ID_CHANGED",
        "TITLE_CHANGED",
        "DESCRIPTION_CHANGED",
        "DEFAULT_CHANGED",
        "SCHEMA_REMOVED",
        "TYPE_EXTENDED",
        "MAX_LENGTH_INCREASED",
        "MAX_LENGTH_REMOVED",
        "MIN_LENGTH_DECREASED",
        "MIN_LENGTH_REMOVED",
        "PATTERN_REMOVED",
        "MAXIMUM_INCREASED",
        "MAXIMUM_REMOVED",
        "MINIMUM_DECREASED",
        "MINIMUM_REMOVED",
        "EXCLUSIVE_MAXIMUM_INCREASED",
        "EXCLUSIVE_MAXIMUM_REMOVED",
        "EXCLUSIVE_MINIMUM_DECREASED",
        "EXCLUSIVE_MINIMUM_REMOVED",
        "MULTIPLE_OF_REDUCED",
        "MULTIPLE_OF_REMOVED",
        "REQUIRED_ATTRIBUTE_WITH_DEFAULT_ADDED",
        "REQUIRED_ATTRIBUTE_REMOVED",
        "DEPENDENCY_ARRAY_NARROWED",
        "DEPENDENCY_ARRAY_REMOVED",
        "DEPENDENCY_SCHEMA_REMOVED",
        "MAX_PROPERTIES_INCREASED",
        "MAX_PROPERTIES_REMOVED",
        "MIN_PROPERTIES_DECREASED",
        "MIN_PROPERTIES_REMOVED",
        "ADDITIONAL_PROPERTIES_ADDED",
        "ADDITIONAL_PROPERTIES_EXTENDED",
        "PROPERTY_WITH_EMPTY_SCHEMA_ADDED_TO_OPEN_CONTENT_MODEL",
        "REQUIRED_PROPERTY_WITH_DEFAULT_ADDED_TO_UNOPEN_CONTENT_MODEL",
        "OPTIONAL_PROPERTY_ADDED_TO_UNOPEN_CONTENT_MODEL",
        "PROPERTY_WITH_FALSE_REMOVED_FROM_CLOSED_CONTENT_MODEL",
        "PROPERTY_REMOVED_FROM_OPEN_CONTENT_MODEL",
        "PROPERTY_ADDED_IS_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL",
        "PROPERTY_REMOVED_IS_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL",
        "MAX_ITEMS_INCREASED",
        "MAX_ITEMS_REMOVED",
        "MIN_ITEMS_DECREASED",
        "MIN_ITEMS_REMOVED",
        "UNIQUE_ITEMS_REMOVED",
        "ADDITIONAL_ITEMS_ADDED",
        "ADDITIONAL_ITEMS_EXTENDED",
        "ITEM_WITH_EMPTY_SCHEMA_ADDED_TO_OPEN_CONTENT_MODEL",
        "ITEM_ADDED_TO_CLOSED_CONTENT_MODEL",
        "ITEM_WITH_FALSE_REMOVED_FROM_CLOSED_CONTENT_MODEL",
        "ITEM_REMOVED_FROM_OPEN_CONTENT_MODEL",
        "ITEM_ADDED_IS_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL",
        "ITEM_REMOVED_IS_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL",
        "ENUM_ARRAY_EXTENDED",
        "COMBINED_TYPE_EXTENDED",
        "PRODUCT_TYPE_NARROWED",
        "SUM_TYPE_EXTENDED",
        "NOT_TYPE_NARROWED",
    ]
)


@dataclass(slots=True, eq=False)
class Node:
    """A schema that constrains one type, or combines others."""

    kind: str
    """A JSON type; or true, false, enum, const, not, ref, or one of the combinations."""
    raw: Any
    parts: list[Node] = field(default_factory=list)
    """The parts that are combined or negated, or the target of a resolved reference."""
    properties: dict[str, Node] = field(default_factory=dict)
    patterns: list[tuple[str, Node]] = field(default_factory=list)
    dependencies: dict[str, Node] = field(default_factory=dict)
    items: list[Node] = field(default_factory=list)
    """The items of a tuple."""
    every_item: Node | None = None
    rest: Node | None = None
    """The schema that further properties or items have to satisfy."""
    takes_rest: bool = True
    """Whether there may be further properties or items."""

    def keyword(self, name: str) -> Any:
        """Return the value of a keyword; None if the schema does not have it."""
        return self.raw.get(name) if isinstance(self.raw, dict) else None

    @property
    def is_open(self) -> bool:
        """Whether further properties or items may be anything."""
        return self.takes_rest and self.rest is None and not self.patterns

    @property
    def has_default(self) -> bool:
        return isinstance(self.raw, dict) and "default" in self.raw

    @property
    def required(self) -> frozenset[str]:
        named = self.keyword("required")
        return frozenset(named) if isinstance(named, list) else frozenset()

    @property
    def needed_by(self) -> dict[str, frozenset[str]]:
        """The properties that other properties require."""
        both = {**(self.keyword("dependencies") or {}), **(self.keyword("dependentRequired") or {})}
        return {name: frozenset(needed) for name, needed in both.items() if isinstance(needed, list)}


class JsonSchema:
    def __init__(self, raw: Any, root: Node) -> None:
        self.raw = raw
        self.root = root

    @classmethod
    def parse(cls, text: str, references: Sequence[tuple[str, str]] = ()) -> JsonSchema:
        """Parse a schema whose references are given as URI and text."""
        raw = read_json(text)
        if not isinstance(raw, dict | bool):
            raise InvalidSchema("a JSON Schema is an object or a boolean")
        documents = {name: read_json(referenced) for name, referenced in references}
        _check_against_metaschema(raw)
        return cls(raw, _Builder(raw, documents).build())

    def canonical(self) -> str:
        """Return the text without insignificant spaces."""
        return write_json(self.raw)

    def normalized(self) -> str:
        """Return the same text for schemas that differ in the order of their keys."""
        return write_json(self.raw, is_sorted=True)

    def resolved(self) -> str:
        """Return the text; its references stay."""
        return self.canonical()


_NO_DOCUMENTS: Final = jsonschema_rs.Registry([])
"""Without it, `$schema` could make the node read any file or address."""


def _check_against_metaschema(raw: Any) -> None:
    try:
        jsonschema_rs.meta.validate(raw, registry=_NO_DOCUMENTS)
    except jsonschema_rs.ValidationError as error:
        place = "/".join(str(step) for step in error.instance_path)
        raise InvalidSchema(f"the JSON Schema is invalid at '#/{place}': {error.message[:500]}") from error
    except (jsonschema_rs.ReferencingError, ValueError) as error:
        # A custom draft: regardless of its vocabulary, known keywords keep their meaning.
        draft = raw.get("$schema") if isinstance(raw, dict) else None
        if not isinstance(draft, str):
            raise InvalidSchema(f"the JSON Schema is invalid: {error}") from error


class _Builder:
    def __init__(self, raw: Any, documents: Mapping[str, Any]) -> None:
        self._raw = raw
        draft = raw.get("$schema", "") if isinstance(raw, dict) else ""
        self._is_modern = isinstance(draft, str) and ("2019-09" in draft or "2020-12" in draft)
        self._by_uri: dict[str, Any] = {}
        self._base_of: dict[int, str] = {}
        self._nodes: dict[int, Node] = {}
        self._depth = 0
        for name, document in documents.items():
            self._register(document, name, 0)
        self._register(raw, "", 0)

    def build(self) -> Node:
        return self._build(self._raw)

    def _register(self, raw: Any, base: str, depth: int, *, is_root: bool = True) -> None:
        """Remember the URI of each part that has one, and the base of every reference."""
        if depth > DEPTH_MAX:
            raise InvalidSchema(f"the schema is nested more than {DEPTH_MAX} levels deep")
        if is_root:
            self._by_uri.setdefault(base, raw)
        if isinstance(raw, list):
            for item in raw:
                self._register(item, base, depth + 1, is_root=False)
        if not isinstance(raw, dict):
            return
        own = raw.get("$id", raw.get("id"))
        if isinstance(own, str):
            base = urljoin(base, own)
            self._by_uri.setdefault(urldefrag(base).url if base.endswith("#") else base, raw)
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(raw.get(key), str):
                self._by_uri.setdefault(f"{base}#{raw[key]}", raw)
        self._base_of[id(raw)] = base
        for value in raw.values():
            if isinstance(value, dict | list):
                self._register(value, base, depth + 1, is_root=False)

    def _build(self, raw: Any) -> Node:
        if isinstance(raw, bool):
            return Node("true" if raw else "false", raw)
        if not isinstance(raw, dict):
            raise InvalidSchema(f"not a schema: {write_json(raw)[:200]}")
        known = self._nodes.get(id(raw))
        if known is not None:
            return known
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise InvalidSchema(f"the schema is nested more than {DEPTH_MAX} levels deep")
        # Registered before its parts are built, which may refer to it.
        node = self._nodes[id(raw)] = Node("ref", raw)
        parts = self._parts(raw)
        if len(parts) == 1:
            node.parts = parts
        elif parts:
            node.parts = [Node("allOf", raw, parts=parts)]
        else:
            node.parts = [Node("true", raw)]
        self._depth -= 1
        return node

    def _parts(self, raw: dict[str, Any]) -> list[Node]:
        parts: list[Node] = []
        if "$ref" in raw:
            parts.append(self._build(self._resolve(raw["$ref"], self._base_of.get(id(raw), ""))))
            if not self._is_modern:
                return parts
        if "enum" in raw:
            parts.append(Node("enum", raw))
        if "const" in raw:
            parts.append(Node("const", raw))
        parts += [
            Node(name, raw, parts=[self._build(subschema) for subschema in _listed(raw, name)])
            for name in _COMBINATIONS
            if name in raw
        ]
        if "not" in raw:
            parts.append(Node("not", raw, parts=[self._build(raw["not"])]))
        named = raw.get("type")
        if isinstance(named, list):
            parts.append(Node("anyOf", raw, parts=[self._typed(type_name, raw) for type_name in named]))
        elif named is not None:
            parts.append(self._typed(named, raw))
        else:
            parts += [self._typed(kind, raw) for kind, keywords in _KEYWORDS.items() if not keywords.isdisjoint(raw)]
        return parts

    def _typed(self, kind: Any, raw: dict[str, Any]) -> Node:
        if kind == "object":
            return self._object(raw)
        if kind == "array":
            return self._array(raw)
        if kind not in ("string", "number", "integer", "boolean", "null"):
            raise InvalidSchema(f"unknown type: {write_json(kind)[:200]}")
        return Node(kind, raw)

    def _object(self, raw: dict[str, Any]) -> Node:
        node = Node("object", raw)
        node.properties = {name: self._build(subschema) for name, subschema in _mapped(raw, "properties").items()}
        node.patterns = [
            (name, self._build(subschema)) for name, subschema in _mapped(raw, "patternProperties").items()
        ]
        for key in ("dependencies", "dependentSchemas"):
            for name, value in _mapped(raw, key).items():
                if not isinstance(value, list):
                    node.dependencies[name] = self._build(value)
        self._set_rest(node, raw.get("additionalProperties", raw.get("unevaluatedProperties", True)))
        return node

    def _array(self, raw: dict[str, Any]) -> Node:
        node = Node("array", raw)
        items, first = raw.get("items"), raw.get("prefixItems")
        if isinstance(first, list):
            node.items = [self._build(item) for item in first]
            self._set_rest(node, raw.get("items", raw.get("unevaluatedItems", True)))
        elif isinstance(items, list):
            node.items = [self._build(item) for item in items]
            self._set_rest(node, raw.get("additionalItems", raw.get("unevaluatedItems", True)))
        elif items is not None:
            node.every_item = self._build(items)
        return node

    def _set_rest(self, node: Node, rest: Any) -> None:
        if isinstance(rest, bool):
            node.takes_rest = rest
        else:
            node.rest = self._build(rest)

    def _resolve(self, reference: Any, base: str) -> Any:
        if not isinstance(reference, str):
            raise InvalidSchema(f"$ref is not a text: {write_json(reference)[:200]}")
        uri = reference if reference in self._by_uri else urljoin(base, reference)
        if uri in self._by_uri:
            return self._by_uri[uri]
        url, pointer = urldefrag(uri)
        document = self._by_uri.get(url)
        if document is None:
            if "json-schema.org/" in url:
                return True
            raise InvalidSchema(f"the reference {reference!r} cannot be resolved")
        for step in unquote(pointer).split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(document, list) and key.isdigit() and int(key) < len(document):
                document = document[int(key)]
            elif isinstance(document, dict) and key in document:
                document = document[key]
            else:
                raise InvalidSchema(f"the reference {reference!r} cannot be resolved")
        return document


def _mapped(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key, {})
    if not isinstance(value, dict):
        raise InvalidSchema(f"{key} is not an object")
    return value


def _listed(raw: Mapping[str, Any], key: str) -> list[Any]:
    value = raw[key]
    if not isinstance(value, list) or not value:
        raise InvalidSchema(f"{key} is not a list of schemas")
    return value


Differences = list[tuple[str, str]]
"""Kinds of differences with the path of each."""


def compare(reader: JsonSchema, writer: JsonSchema) -> list[Difference]:
    """Return why the reader does not allow everything that the writer allows; empty if it does."""
    differences = _Comparison().compare(writer.root, reader.root, "#/")
    return [Difference(kind, _describe(kind, path)) for kind, path in differences if kind not in _COMPATIBLE]


def _is_compatible(differences: Differences) -> bool:
    return all(kind in _COMPATIBLE for kind, _path in differences)


def _join(path: str, *steps: object) -> str:
    return "/".join([path.rstrip("/"), *(str(step) for step in steps)])


class _Comparison:
    """Compares an original, the writer's schema, with an update, the reader's.

    A pair that is being compared counts as compatible, so that recursive schemas end.
    """

    def __init__(self) -> None:
        self._results: dict[tuple[int, int], Differences] = {}
        self._patterns: dict[str, Any] = {}

    def compare(self, original: Node | None, update: Node | None, path: str) -> Differences:
        original, update = _target(original), _target(update)
        if original is None or update is None:
            if original is update:
                return []
            return [("SCHEMA_ADDED" if original is None else "SCHEMA_REMOVED", path)]
        pair = (id(original), id(update))
        if pair not in self._results:
            self._results[pair] = []
            self._results[pair] = self._decide(original, update, path)
        return self._results[pair]

    def _decide(self, original: Node, update: Node, path: str) -> Differences:
        covered = self._compare_with_combination(original, update, path)
        if covered is not None:
            return covered
        if _family(original) != _family(update):
            return [] if original.kind == "false" or update.kind == "true" else [("TYPE_CHANGED", path)]
        differences: Differences = [
            (f"{kind}_CHANGED", path) for key, kind in _ANNOTATIONS if original.keyword(key) != update.keyword(key)
        ]
        match _family(original):
            case "string":
                differences += _compare_limit(original, update, "maxLength", "MAX_LENGTH", path)
                differences += _compare_limit(original, update, "minLength", "MIN_LENGTH", path)
                differences += _compare_pattern(original, update, path)
            case "number":
                differences += _compare_numbers(original, update, path)
            case "enum" | "const":
                differences += _compare_values(original, update, path)
            case "combination":
                differences += self._compare_combinations(original, update, path)
            case "not":
                reverse = self.compare(update.parts[0], original.parts[0], _join(path, "not"))
                differences.append(("NOT_TYPE_NARROWED" if _is_compatible(reverse) else "NOT_TYPE_EXTENDED", path))
            case "object":
                differences += self._compare_objects(original, update, path)
            case "array":
                differences += self._compare_arrays(original, update, path)
        return differences

    def _compare_with_combination(self, original: Node, update: Node, path: str) -> Differences | None:
        """Compare a combination with a plain schema; None if that decides nothing."""
        is_original, is_update = original.kind in _COMBINATIONS, update.kind in _COMBINATIONS
        if is_original == is_update:
            return None
        if is_original:
            if len(original.parts) == 1:
                differences = self.compare(original.parts[0], update, path)
                return differences if _is_compatible(differences) else None
            return None
        if len(update.parts) == 1:
            differences = self.compare(original, update.parts[0], path)
            return differences if _is_compatible(differences) else None
        if update.kind != "allOf":
            for part in update.parts:
                differences = self.compare(original, part, path)
                if _is_compatible(differences):
                    return [*differences, ("SUM_TYPE_EXTENDED", path)]
        return None

    def _compare_combinations(self, original: Node, update: Node, path: str) -> Differences:
        differences: Differences = []
        if original.kind != update.kind:
            is_single = len(original.parts) == 1 and (update.kind == "oneOf" or len(update.parts) == 1)
            if update.kind != "anyOf" and not is_single:
                return [("COMBINED_TYPE_CHANGED", path)]
            differences.append(("COMBINED_TYPE_EXTENDED", path))
        before, after = _distinct(original.parts), _distinct(update.parts)
        name = "PRODUCT_TYPE" if update.kind == "allOf" else "SUM_TYPE"
        if len(before) != len(after):
            differences.append((f"{name}_{'EXTENDED' if len(before) < len(after) else 'NARROWED'}", path))
        edges = [
            {
                number: pairs
                for number, other in enumerate(after)
                if _is_compatible(pairs := self.compare(item, other, _join(path, original.kind, index)))
            }
            for index, item in enumerate(before)
        ]
        matching = _match(edges)
        for number, index in matching.items():
            differences += edges[index][number]
        if len(matching) < min(len(before), len(after)):
            differences.append(("COMBINED_TYPE_SUBSCHEMAS_CHANGED", path))
        return differences

    def _compare_objects(self, original: Node, update: Node, path: str) -> Differences:
        differences: Differences = []
        for name, after in update.properties.items():
            if name in original.properties:
                differences += _compare_required(original, update, name, after, _join(path, "required", name))
        for name in dict.fromkeys([*original.properties, *update.properties]):
            place = _join(path, "properties", name)
            if name not in update.properties:
                differences += self._property_removed(original.properties[name], update, name, place)
            elif name not in original.properties:
                differences += self._property_added(original, update, name, place)
            else:
                differences += self.compare(original.properties[name], update.properties[name], place)
        differences += self._compare_dependencies(original, update, _join(path, "dependencies"))
        differences += self._compare_rest(
            original, update, "ADDITIONAL_PROPERTIES", _join(path, "additionalProperties")
        )
        differences += _compare_limit(original, update, "maxProperties", "MAX_PROPERTIES", path)
        differences += _compare_limit(original, update, "minProperties", "MIN_PROPERTIES", path)
        return differences

    def _property_removed(self, removed: Node, update: Node, name: str, path: str) -> Differences:
        if update.is_open:
            return [("PROPERTY_REMOVED_FROM_OPEN_CONTENT_MODEL", path)]
        covering = self._covering(update, name)
        if covering is not None:
            differences = self.compare(removed, covering, path)
            how = "IS" if _is_compatible(differences) else "NOT"
            return [*differences, (f"PROPERTY_REMOVED_{how}_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL", path)]
        how = "WITH_FALSE_REMOVED" if _kind(removed) == "false" else "REMOVED"
        return [(f"PROPERTY_{how}_FROM_CLOSED_CONTENT_MODEL", path)]

    def _property_added(self, original: Node, update: Node, name: str, path: str) -> Differences:
        added = update.properties[name]
        if original.is_open:
            if _kind(added) == "true":
                return [("PROPERTY_WITH_EMPTY_SCHEMA_ADDED_TO_OPEN_CONTENT_MODEL", path)]
            return [("PROPERTY_ADDED_TO_OPEN_CONTENT_MODEL", path)]
        differences: Differences = []
        covering = self._covering(original, name)
        if covering is not None:
            differences = list(self.compare(covering, added, path))
            how = "IS" if _is_compatible(differences) else "NOT"
            differences.append((f"PROPERTY_ADDED_{how}_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL", path))
        if name not in update.required:
            differences.append(("OPTIONAL_PROPERTY_ADDED_TO_UNOPEN_CONTENT_MODEL", path))
        elif added.has_default:
            differences.append(("REQUIRED_PROPERTY_WITH_DEFAULT_ADDED_TO_UNOPEN_CONTENT_MODEL", path))
        else:
            differences.append(("REQUIRED_PROPERTY_ADDED_TO_UNOPEN_CONTENT_MODEL", path))
        return differences

    def _covering(self, node: Node, name: str) -> Node | None:
        """Return the schema of properties without their own."""
        for pattern, covering in node.patterns:
            if self._compiled(pattern).search(name):
                return covering
        return node.rest

    def _compiled(self, pattern: str) -> Any:
        if pattern not in self._patterns:
            try:
                self._patterns[pattern] = re2.compile(pattern)
            except re2.error:
                # Lookaround, for example; this process has a time limit.
                try:
                    self._patterns[pattern] = re.compile(pattern)
                except re.error as error:
                    raise InvalidSchema(f"the pattern {pattern!r} is invalid: {error}") from error
        return self._patterns[pattern]

    def _compare_dependencies(self, original: Node, update: Node, path: str) -> Differences:
        differences: Differences = []
        before, after = original.needed_by, update.needed_by
        for name in dict.fromkeys([*before, *after]):
            place = _join(path, name)
            if name not in after:
                differences.append(("DEPENDENCY_ARRAY_REMOVED", place))
            elif name not in before:
                differences.append(("DEPENDENCY_ARRAY_ADDED", place))
            elif before[name] != after[name]:
                differences.append((f"DEPENDENCY_ARRAY_{_change_of(before[name], after[name])}", place))
        for name in dict.fromkeys([*original.dependencies, *update.dependencies]):
            place = _join(path, name)
            if name not in update.dependencies:
                differences.append(("DEPENDENCY_SCHEMA_REMOVED", place))
            elif name not in original.dependencies:
                differences.append(("DEPENDENCY_SCHEMA_ADDED", place))
            else:
                differences += self.compare(original.dependencies[name], update.dependencies[name], place)
        return differences

    def _compare_rest(self, original: Node, update: Node, name: str, path: str) -> Differences:
        if original.takes_rest != update.takes_rest:
            return [(f"{name}_{'ADDED' if update.takes_rest else 'REMOVED'}", path)]
        if original.rest is None and update.rest is not None:
            return [(f"{name}_NARROWED", path)]
        if original.rest is not None and update.rest is None:
            return [(f"{name}_EXTENDED", path)]
        return self.compare(original.rest, update.rest, path)

    def _compare_arrays(self, original: Node, update: Node, path: str) -> Differences:
        differences = list(self.compare(original.every_item, update.every_item, _join(path, "items")))
        for index, (before, after) in enumerate(zip(original.items, update.items, strict=False)):
            differences += self.compare(before, after, _join(path, "items", index))
        shared = min(len(original.items), len(update.items))
        for index, removed in enumerate(original.items[shared:], shared):
            differences += self._item_removed(removed, update, _join(path, "items", index))
        for index, added in enumerate(update.items[shared:], shared):
            differences += self._item_added(original, added, _join(path, "items", index))
        differences += self._compare_rest(original, update, "ADDITIONAL_ITEMS", _join(path, "additionalItems"))
        differences += _compare_limit(original, update, "maxItems", "MAX_ITEMS", path)
        differences += _compare_limit(original, update, "minItems", "MIN_ITEMS", path)
        before_unique, after_unique = original.keyword("uniqueItems") is True, update.keyword("uniqueItems") is True
        if before_unique != after_unique:
            differences.append((f"UNIQUE_ITEMS_{'REMOVED' if before_unique else 'ADDED'}", _join(path, "uniqueItems")))
        return differences

    def _item_removed(self, removed: Node, update: Node, path: str) -> Differences:
        if update.is_open:
            return [("ITEM_REMOVED_FROM_OPEN_CONTENT_MODEL", path)]
        if update.rest is not None:
            differences = self.compare(removed, update.rest, path)
            how = "IS" if _is_compatible(differences) else "NOT"
            return [*differences, (f"ITEM_REMOVED_{how}_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL", path)]
        how = "WITH_FALSE_REMOVED" if _kind(removed) == "false" else "REMOVED"
        return [(f"ITEM_{how}_FROM_CLOSED_CONTENT_MODEL", path)]

    def _item_added(self, original: Node, added: Node, path: str) -> Differences:
        if original.is_open:
            how = "WITH_EMPTY_SCHEMA_ADDED" if _kind(added) == "true" else "ADDED"
            return [(f"ITEM_{how}_TO_OPEN_CONTENT_MODEL", path)]
        if original.rest is None:
            return [("ITEM_ADDED_TO_CLOSED_CONTENT_MODEL", path)]
        differences = self.compare(original.rest, added, path)
        how = "IS" if _is_compatible(differences) else "NOT"
        return [*differences, (f"ITEM_ADDED_{how}_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL", path)]


_ANYTHING: Final = Node("true", True)


def _target(node: Node | None) -> Node | None:
    """Follow references; one that leads back to itself allows everything."""
    seen: set[int] = set()
    while node is not None and node.kind == "ref":
        if id(node) in seen or not node.parts:
            return _ANYTHING
        seen.add(id(node))
        node = node.parts[0]
    return node


def _kind(node: Node) -> str:
    target = _target(node)
    return "true" if target is None else target.kind


def _family(node: Node) -> str:
    if node.kind in _COMBINATIONS:
        return "combination"
    return "number" if node.kind == "integer" else node.kind


def _distinct(parts: Iterable[Node]) -> list[Node]:
    return list({write_json([part.kind, part.raw], is_sorted=True): part for part in parts}.values())


def _match(edges: Sequence[Mapping[int, Differences]]) -> dict[int, int]:
    """Match as many as possible of both sides; return the left index of each right index that is matched."""
    matched: dict[int, int] = {}

    def place(start: int) -> None:
        # Breadth first, so that the depth of recursion does not grow with the number of parts.
        came_from: dict[int, int] = {}
        queue = [start]
        for left in queue:
            for right in edges[left]:
                if right in came_from:
                    continue
                came_from[right] = left
                if right in matched:
                    queue.append(matched[right])
                    continue
                at: int | None = right
                while at is not None:
                    owner = came_from[at]
                    previous = next((taken for taken, by in matched.items() if by == owner), None)
                    matched[at] = owner
                    at = previous if owner != start else None
                return

    for index in range(len(edges)):
        place(index)
    return matched


def _number(value: Any) -> Decimal | None:
    return Decimal(str(value)) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _compare_limit(original: Node, update: Node, key: str, name: str, path: str) -> Differences:
    before, after = _number(original.keyword(key)), _number(update.keyword(key))
    if before == after:
        return []
    if before is None:
        how = "ADDED"
    elif after is None:
        how = "REMOVED"
    else:
        how = "INCREASED" if before < after else "DECREASED"
    return [(f"{name}_{how}", _join(path, key))]


def _compare_numbers(original: Node, update: Node, path: str) -> Differences:
    differences: Differences = []
    for key, name in (
        ("maximum", "MAXIMUM"),
        ("minimum", "MINIMUM"),
        ("exclusiveMaximum", "EXCLUSIVE_MAXIMUM"),
        ("exclusiveMinimum", "EXCLUSIVE_MINIMUM"),
    ):
        differences += _compare_limit(original, update, key, name, path)
    before, after = _number(original.keyword("multipleOf")), _number(update.keyword("multipleOf"))
    if before != after:
        if before is None:
            how = "ADDED"
        elif after is None:
            how = "REMOVED"
        elif before and after % before == 0:
            how = "EXPANDED"
        else:
            how = "REDUCED" if after and before % after == 0 else "CHANGED"
        differences.append((f"MULTIPLE_OF_{how}", _join(path, "multipleOf")))
    if original.kind != update.kind:
        differences.append(("TYPE_EXTENDED" if original.kind == "integer" else "TYPE_NARROWED", path))
    return differences


def _compare_pattern(original: Node, update: Node, path: str) -> Differences:
    before, after = original.keyword("pattern"), update.keyword("pattern")
    if before == after:
        return []
    how = "ADDED" if before is None else "REMOVED" if after is None else "CHANGED"
    return [(f"PATTERN_{how}", _join(path, "pattern"))]


def _compare_values(original: Node, update: Node, path: str) -> Differences:
    key = original.kind
    before, after = (
        frozenset(write_json(value, is_sorted=True) for value in (values if key == "enum" else [values]))
        for values in (original.keyword(key), update.keyword(key))
    )
    return [] if before == after else [(f"ENUM_ARRAY_{_change_of(before, after)}", _join(path, key))]


def _change_of(before: frozenset[str], after: frozenset[str]) -> str:
    if after > before:
        return "EXTENDED"
    return "NARROWED" if after < before else "CHANGED"


def _compare_required(original: Node, update: Node, name: str, after: Node, path: str) -> Differences:
    if (name in original.required) == (name in update.required):
        return []
    if name in original.required:
        return [("REQUIRED_ATTRIBUTE_REMOVED", path)]
    return [("REQUIRED_ATTRIBUTE_WITH_DEFAULT_ADDED" if after.has_default else "REQUIRED_ATTRIBUTE_ADDED", path)]


def _describe(kind: str, path: str) -> str:
    at = f"At {path}, "
    if "CONTENT_MODEL" in kind:
        return at + _describe_content(kind)
    if kind.startswith(("TYPE_", "COMBINED_TYPE", "ENUM_ARRAY_CHANGED")):
        return f"{at}the {{reader}} schema has another type than the {{writer}} one"
    if kind.endswith("_CHANGED"):
        return f"{at}the {{reader}} schema has another value than the {{writer}} one"
    if kind.endswith(("_INCREASED", "_EXPANDED")):
        return f"{at}the {{reader}} schema has a larger value than the {{writer}} one"
    if kind.endswith("_DECREASED"):
        return f"{at}the {{reader}} schema has a smaller value than the {{writer}} one"
    if kind.endswith(("_NARROWED", "_EXTENDED")):
        how = "fewer" if kind.endswith("_NARROWED") else "more"
        return f"{at}the {{reader}} schema allows {how} alternatives than the {{writer}} one"
    return f"{at}the {{reader}} schema has a keyword that the {{writer}} one lacks"


def _describe_content(kind: str) -> str:
    if kind.endswith("ADDED_TO_OPEN_CONTENT_MODEL"):
        return "the {reader} schema describes what the {writer} one, which is open, left free"
    if kind.startswith("REQUIRED_PROPERTY"):
        return "the {reader} schema requires a property that the {writer} one does not have"
    if kind.endswith("FROM_CLOSED_CONTENT_MODEL"):
        return "the {reader} schema, which is closed, lacks a property or item of the {writer} one"
    if "REMOVED" in kind:
        return "the {reader} schema lacks a property or item of the {writer} one, and allows no replacement"
    return "the {reader} schema has a property or item for which the {writer} one allows something else"
