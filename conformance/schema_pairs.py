"""Decides generated pairs of schemas with our checks and with Apicurio's libraries, and shows where they disagree.

    python -m conformance.schema_pairs [--pairs N] [--seed N] [--type AVRO|JSON|PROTOBUF] [--all]

A pair is a schema and a copy with one to three changes, or two schemas that have nothing to do with each other. Both
sides say whether the first can read what the second wrote, and why not. For Avro, Apicurio calls Avro's own Java
library, as Confluent's registry does; for JSON Schema and Protobuf, its rules are its own. Disagreements are grouped by
the reasons of the side that objects. `EXPLAINED` names why each of these reasons exists on one side only; the exit
code is 1 when a reason is not named there.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import jsonschema_rs
from conformance.client import BUILT, HERE, Unavailable, run_builder
from conformance.java_client import OFFLINE, check_java, class_path

from millstream.protocol.schemas import avro, json_schema, protobuf
from millstream.protocol.schemas.formats import InvalidSchema

PAIRS: Final = 3000
RUN_S_MAX: Final = 600.0


@dataclass(frozen=True, slots=True)
class Pair:
    """A reader's and a writer's schema of one type."""

    type: str
    reader: str
    writer: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Return why the reader cannot read the writer's values; `invalid` if either is not a schema."""

    reasons: frozenset[str]
    invalid: str = ""


# -- Avro ------------------------------------------------------------------------------------------------------------

_PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
_PROMOTED: Mapping[str, Sequence[str]] = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}
_LOGICAL = (("int", "date"), ("long", "timestamp-millis"), ("string", "uuid"))
_DEFAULTS: Mapping[str, Any] = {
    "null": None,
    "boolean": True,
    "int": 1,
    "long": 2,
    "float": 1.5,
    "double": 2.5,
    "bytes": "a",
    "string": "a",
}


class AvroPairs:
    """Avro schemas: named types are declared once, under names that a changed copy keeps."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._named = 0

    def schema(self) -> Any:
        """A schema of up to three levels."""
        return self._type(3)

    def _type(self, depth: int) -> Any:
        random = self._random
        kind = random.choice(("plain", "plain", "plain", "logical", "enum", "fixed", *("record", "deep") * 2))
        if kind == "record" and depth:
            return self._record(depth)
        if kind == "deep" and depth:
            return self._container(depth)
        if kind == "enum":
            symbols = random.sample("abcd", random.randint(1, 3))
            default = {"default": symbols[0]} if random.random() < 0.3 else {}
            return {"type": "enum", "name": self._name("E"), "symbols": symbols, **default}
        if kind == "fixed":
            return {"type": "fixed", "name": self._name("F"), "size": random.choice((4, 8))}
        if kind == "logical":
            base, logical = random.choice(_LOGICAL)
            return {"type": base, "logicalType": logical}
        return random.choice(_PRIMITIVES)

    def _container(self, depth: int) -> Any:
        kind = self._random.choice(("array", "map", "union"))
        if kind == "array":
            return {"type": "array", "items": self._type(depth - 1)}
        if kind == "map":
            return {"type": "map", "values": self._type(depth - 1)}
        branches: list[Any] = self._random.sample(_PRIMITIVES, self._random.randint(1, 3))
        if self._random.random() < 0.4:
            branches.append(self._record(depth - 1))
        return branches

    def _record(self, depth: int) -> Any:
        names = self._random.sample("pqrst", self._random.randint(0, 3))
        record_name, fields = self._name("R"), [self._field(name, depth) for name in names]
        if fields and self._random.random() < 0.1:
            fields[-1] = {"name": fields[-1]["name"], "type": ["null", record_name]}
        return {"type": "record", "name": record_name, "fields": fields}

    def _field(self, name: str, depth: int) -> dict[str, Any]:
        kind = self._type(depth - 1 if depth else 0)
        made = {"name": name, "type": kind}
        if isinstance(kind, str) and kind in _DEFAULTS and self._random.random() < 0.5:
            made["default"] = _DEFAULTS[kind]
        return made

    def _name(self, letter: str) -> str:
        self._named += 1
        return f"{letter}{self._named}"

    def change(self, schema: Any) -> Any:
        nodes = list(_nodes(schema))
        holder, key = self._random.choice(nodes) if nodes else (None, None)
        if holder is None:
            return self._type(2)
        here = holder[key]
        if isinstance(here, dict) and here.get("type") == "record" and self._random.random() < 0.7:
            self._change_record(here)
        elif isinstance(here, dict) and here.get("type") == "enum":
            here["symbols"] = self._random.sample("abcd", self._random.randint(1, 4))
            here.pop("default", None)
            if self._random.random() < 0.4:
                here["default"] = here["symbols"][0]
        elif isinstance(here, dict) and here.get("type") == "fixed":
            here["size"] = self._random.choice((4, 8))
        elif isinstance(here, list) and self._random.random() < 0.7:
            self._change_union(here)
        elif isinstance(here, str) and here in _PROMOTED and self._random.random() < 0.5:
            holder[key] = self._random.choice(_PROMOTED[here])
            _drop_default(holder)
        elif isinstance(here, (dict, str)) and self._random.random() < 0.5:
            holder[key] = ["null", here] if here != "null" else ["null", "int"]
            _drop_default(holder)
        else:
            holder[key] = self._type(1)
            _drop_default(holder)
        return schema

    def _change_record(self, record: dict[str, Any]) -> None:
        fields = record["fields"]
        what = self._random.choice(("add", "remove", "rename", "alias", "name"))
        if what == "add" or not fields:
            free = [name for name in "pqrstuv" if all(name != field["name"] for field in fields)]
            fields.insert(self._random.randint(0, len(fields)), self._field(self._random.choice(free), 0))
        elif what == "remove":
            fields.pop(self._random.randrange(len(fields)))
        elif what == "name":
            record["aliases"] = [record["name"]] if self._random.random() < 0.5 else []
            record["name"] = self._name("R")
        else:
            chosen = self._random.choice(fields)
            if what == "alias":
                chosen["aliases"] = [chosen["name"]]
            chosen["name"] = f"{chosen['name']}x"

    def _change_union(self, branches: list[Any]) -> None:
        missing = [primitive for primitive in _PRIMITIVES if primitive not in branches]
        if len(branches) > 1 and self._random.random() < 0.5:
            branches.pop(self._random.randrange(len(branches)))
        else:
            branches.insert(self._random.randint(0, len(branches)), self._random.choice(missing))

    def text(self, schema: Any) -> str:
        """The schema as a client sends it."""
        return json.dumps(schema)


def _nodes(schema: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the positions of types below a schema: the object or list, and the key."""
    if isinstance(schema, list):
        for index, branch in enumerate(schema):
            if not isinstance(branch, str):
                yield schema, index
                yield from _nodes(branch)
    elif isinstance(schema, dict):
        for key in ("items", "values"):
            if key in schema:
                yield schema, key
                yield from _nodes(schema[key])
        for field in schema.get("fields", ()):
            yield field, "type"
            yield from _nodes(field["type"])


def _drop_default(holder: Any) -> None:
    if isinstance(holder, dict):
        holder.pop("default", None)


# -- JSON Schema -----------------------------------------------------------------------------------------------------


class JsonPairs:
    """JSON Schemas of draft 7 with every keyword that decides about compatibility."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def schema(self) -> Any:
        """A schema of up to two levels."""
        return {"$schema": "http://json-schema.org/draft-07/schema#", **self._type(2)}

    def _type(self, depth: int) -> dict[str, Any]:
        kind = self._random.choice(
            ("string", "integer", "number", "boolean", "null", "enum", "const", "anything")
            + (("object", "array", "oneOf", "anyOf", "allOf", "not", "types") * 2 if depth else ())
        )
        make: Callable[[int], dict[str, Any]] | None = getattr(self, f"_{kind}", None)
        return make(depth) if make is not None else {"type": kind}

    def _keywords(self, keywords: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        return {name: make() for name, make in keywords.items() if self._random.random() < 0.25}

    def _few(self) -> int:
        return self._random.randint(0, 4)

    def _truth(self) -> bool:
        return self._random.random() < 0.5

    def _string(self, depth: int) -> dict[str, Any]:
        def patterns() -> str:
            return self._random.choice(("a", "^b"))

        keywords = self._keywords({"minLength": self._few, "maxLength": self._few, "pattern": patterns})
        return {"type": "string", **keywords}

    def _number(self, depth: int) -> dict[str, Any]:
        keywords = dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), self._few)
        made_schema = self._keywords({**keywords, "multipleOf": lambda: self._few() + 1})
        return {"type": self._random.choice(("number", "integer")), **made_schema}

    _integer = _number

    def _anything(self, depth: int) -> dict[str, Any]:
        return {}

    def _enum(self, depth: int) -> dict[str, Any]:
        return {"enum": self._random.sample([1, "a", "b", True, None], self._random.randint(1, 3))}

    def _const(self, depth: int) -> dict[str, Any]:
        return {"const": self._random.choice([1, "a"])}

    def _types(self, depth: int) -> dict[str, Any]:
        kinds = ["string", "integer", "boolean", "null", "object"]
        return {"type": self._random.sample(kinds, self._random.randint(2, 3))}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample("abc", self._random.randint(0, 3))

        def inner() -> dict[str, Any]:
            return self._type(depth - 1)

        made_schema = self._keywords(
            {
                "required": lambda: [name for name in names if self._truth()] or names,
                "additionalProperties": lambda: False if self._truth() else (True if self._truth() else inner()),
                "patternProperties": lambda: {self._random.choice(("^x", "^y")): inner()},
                "minProperties": self._few,
                "maxProperties": self._few,
                "dependencies": lambda: {self._random.choice("ab"): [self._random.choice("bc")]},
            }
        )
        if not made_schema.get("required", True):
            del made_schema["required"]
        return {"type": "object", "properties": {name: inner() for name in names}, **made_schema}

    def _array(self, depth: int) -> dict[str, Any]:
        def inner() -> dict[str, Any]:
            return self._type(depth - 1)

        made_schema = self._keywords(
            {
                "items": lambda: inner() if self._truth() else [inner() for _ in range(self._random.randint(1, 2))],
                "additionalItems": lambda: False if self._truth() else inner(),
                "minItems": self._few,
                "maxItems": self._few,
                "uniqueItems": self._truth,
            }
        )
        return {"type": "array", **made_schema}

    def _combined(self, keyword: str, depth: int) -> dict[str, Any]:
        return {keyword: [self._type(depth - 1) for _ in range(self._random.randint(1, 3))]}

    def _oneOf(self, depth: int) -> dict[str, Any]:  # noqa: N802
        return self._combined("oneOf", depth)

    def _anyOf(self, depth: int) -> dict[str, Any]:  # noqa: N802
        return self._combined("anyOf", depth)

    def _allOf(self, depth: int) -> dict[str, Any]:  # noqa: N802
        return self._combined("allOf", depth)

    def _not(self, depth: int) -> dict[str, Any]:
        return {"not": self._type(depth - 1)}

    def change(self, schema: Any) -> Any:
        """Change one keyword of one subschema, or put another subschema in its place."""
        here = self._random.choice(list(_subschemas(schema)))
        head = {key: value for key, value in here.items() if key == "$schema"}
        if self._random.random() < 0.15:
            changed = self._type(1)
        else:
            changed = {key: value for key, value in here.items() if key != "$schema"}
            again = self._again(changed)
            keyword = self._random.choice(sorted({*changed, *again} - {"type"}) or ["type"])
            if keyword == "properties" and keyword in changed:
                self._change_properties(changed)
            elif keyword in again:
                changed[keyword] = again[keyword]
            elif keyword != "type":
                changed.pop(keyword)
            else:
                changed = self._type(1)
        here.clear()
        here.update(head | changed)
        return schema

    def _again(self, here: dict[str, Any]) -> dict[str, Any]:
        """Other values for the keywords of this kind of schema."""
        kind = here.get("type", next((key for key in here if key in ("enum", "const", "oneOf", "anyOf", "allOf")), ""))
        make = getattr(self, f"_{kind}", None) if isinstance(kind, str) and kind else None
        made_schema: dict[str, Any] = make(1) if make is not None else {}
        return {key: value for key, value in made_schema.items() if key not in ("type", "properties")}

    def _change_properties(self, here: dict[str, Any]) -> None:
        properties = here["properties"]
        free = [name for name in "abcd" if name not in properties]
        if properties and (not free or self._truth()):
            properties.pop(self._random.choice(sorted(properties)))
        else:
            properties[self._random.choice(free)] = self._type(1)

    def text(self, schema: Any) -> str:
        """The schema as a client sends it."""
        return json.dumps(schema)


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key in ("not", "additionalProperties", "additionalItems", "items"):
        yield from _subschemas(schema.get(key))
    for key in ("items", "oneOf", "anyOf", "allOf"):
        for subschema in schema[key] if isinstance(schema.get(key), list) else ():
            yield from _subschemas(subschema)
    for key in ("properties", "patternProperties"):
        for subschema in schema.get(key, {}).values():
            yield from _subschemas(subschema)


# -- Protobuf --------------------------------------------------------------------------------------------------------

_SCALARS = ("int32", "int64", "uint32", "sint32", "fixed32", "bool", "string", "bytes", "double", "float")


@dataclass(slots=True)
class _Field:
    name: str
    number: int
    kind: str
    label: str = ""
    oneof: str = ""


class ProtobufPairs:
    """Protobuf files with two messages and an enum: fields of every kind, maps, oneofs and reserved numbers."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def schema(self) -> Any:
        """The fields of the messages A and B, and what A reserves."""
        return {
            "package": "",
            "A": [self._field(name, number) for number, name in enumerate("abcd"[: self._random.randint(1, 4)], 1)],
            "B": [self._field(name, number, nested=False) for number, name in enumerate("xy", 1)],
            "reserved": set(),
            "enum": ["ZERO", "ONE"],
            "messages": ["A", "B"],
        }

    def _field(self, name: str, number: int, *, nested: bool = True) -> _Field:
        random = self._random
        if nested and random.random() < 0.3:
            return _Field(name, number, random.choice(("B", "E", "map<string, int32>", "map<string, B>")))
        oneof = "o" if nested and random.random() < 0.2 else ""
        label = "" if oneof else random.choice(("", "", "repeated ", "optional "))
        return _Field(name, number, random.choice(_SCALARS), label, oneof)

    def change(self, schema: Any) -> Any:
        """Change one element of the file."""
        random = self._random
        fields = schema["A"] if random.random() < 0.8 else schema["B"]
        chosen = random.choice(fields) if fields else None
        what = random.choice(
            (
                "add",
                "remove",
                "reserve",
                "rename",
                "renumber",
                "kind",
                "kind",
                "label",
                "oneof",
                "enum",
                "package",
                "message",
            )
        )
        if what == "package" and random.random() < 0.3:
            schema["package"] = "x"
        elif what == "message" and random.random() < 0.5 and not any("B" in field.kind for field in schema["A"]):
            schema["messages"] = ["A"]
        elif what == "enum":
            schema["enum"] = random.choice((["ZERO"], ["ZERO", "ONE", "TWO"], ["ZERO", "UNO"]))
        elif what == "add" or chosen is None:
            number = max((field.number for field in fields), default=0) + 1
            fields.append(self._field(f"n{number}", number, nested=fields is schema["A"]))
        elif what in ("remove", "reserve"):
            fields.remove(chosen)
            if what == "reserve" and fields is schema["A"]:
                schema["reserved"] |= {chosen.number, chosen.name}
        elif what == "rename":
            chosen.name = f"{chosen.name}z"
        elif what == "renumber":
            chosen.number = max(field.number for field in fields) + 1
        elif what == "kind" and "<" not in chosen.kind:
            chosen.kind = random.choice(_SCALARS)
        elif what == "label" and not chosen.oneof and "<" not in chosen.kind:
            chosen.label = random.choice(("", "repeated ", "optional "))
        elif what == "oneof" and fields is schema["A"] and "<" not in chosen.kind:
            chosen.oneof, chosen.label = "" if chosen.oneof else "o", ""
        return schema

    def text(self, schema: Any) -> str:
        """The schema as a client sends it."""
        lines = ['syntax = "proto3";', *([f"package {schema['package']};"] if schema["package"] else [])]
        for name in schema["messages"]:
            lines.append(f"message {name} {{")
            if name == "A":
                lines += [f"  reserved {_reserved(item)};" for item in sorted(schema["reserved"], key=str)]
            plain = [field for field in schema[name] if not field.oneof]
            chosen = [field for field in schema[name] if field.oneof]
            lines += [f"  {field.label}{field.kind} {field.name} = {field.number};" for field in plain]
            if chosen:
                lines += [
                    "  oneof o {",
                    *(f"    {field.kind} {field.name} = {field.number};" for field in chosen),
                    "  }",
                ]
            lines.append("}")
        symbols = " ".join(f"{name} = {number};" for number, name in enumerate(schema["enum"]))
        return "\n".join([*lines, f"enum E {{ {symbols} }}", ""])


def _reserved(item: int | str) -> str:
    return json.dumps(item)


# -- Both opinions ---------------------------------------------------------------------------------------------------

_MAKERS: Mapping[str, Callable[[Random], Any]] = {"AVRO": AvroPairs, "JSON": JsonPairs, "PROTOBUF": ProtobufPairs}


def make_pairs(schema_type: str, count: int, seed: int) -> list[Pair]:
    """The same pairs for the same seed; of ten, nine are a schema and a changed copy, in both directions."""
    random = Random(f"{schema_type}/{seed}")
    pairs: list[Pair] = []
    while len(pairs) < count:
        maker = _MAKERS[schema_type](random)
        one = maker.schema()
        other = copy.deepcopy(one)
        if random.random() < 0.1:
            other = maker.schema()
        else:
            for _ in range(random.choice((1, 1, 2, 3))):
                other = maker.change(other)
        texts = [maker.text(one), maker.text(other)]
        random.shuffle(texts)
        pairs.append(Pair(schema_type, *texts))
    return pairs


def decide_ours(pair: Pair) -> Verdict:
    """Decide with the registry's own rules."""
    try:
        return Verdict(frozenset(difference.kind for difference in _compare_ours(pair)))
    except InvalidSchema as error:
        return Verdict(frozenset(), invalid=str(error))


def _compare_ours(pair: Pair) -> Sequence[Any]:
    if pair.type == "AVRO":
        return avro.compare(avro.AvroSchema.parse(pair.reader), avro.AvroSchema.parse(pair.writer))
    if pair.type == "JSON":
        return json_schema.compare(json_schema.JsonSchema.parse(pair.reader), json_schema.JsonSchema.parse(pair.writer))
    return protobuf.compare(protobuf.ProtobufSchema.parse(pair.reader), protobuf.ProtobufSchema.parse(pair.writer))


def decide_theirs(pairs: Sequence[Pair]) -> list[Verdict]:
    """Decide with Apicurio's libraries, in one Java process."""
    output = _compile()
    lines = "".join(
        f"{json.dumps({'type': pair.type, 'reader': pair.reader, 'writer': pair.writer})}\n" for pair in pairs
    )
    command = [
        "java",
        "-Xmx512m",
        "-XX:+UseSerialGC",
        "-cp",
        class_path(output),
        "millstream.conformance.schemas.Decide",
    ]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=RUN_S_MAX, check=True)
    responses = [json.loads(line) for line in done.stdout.splitlines()]
    if len(responses) != len(pairs):
        raise RuntimeError(
            f"{len(pairs)} pairs were asked about, {len(responses)} got a response: {done.stderr[-2000:]}"
        )
    return [
        Verdict(frozenset(_kind_of(reason) for reason in response["reasons"]), invalid=response.get("error", ""))
        for response in responses
    ]


def _kind_of(reason: str) -> str:
    """The kind of a reason; Apicurio's reasons for Protobuf are sentences with numbers and names in them."""
    return " ".join(word for word in reason.partition(", message")[0].split() if not word.isdecimal())


def _compile() -> Any:
    check_java()
    output = BUILT / "apicurio"
    run_builder(["mvn", "-q", "-B", f"-Doutput={output}", "compile"], folder=HERE / "apicurio", offline_marks=OFFLINE)
    return output


OURS: Final = "ours"
THEIRS: Final = "theirs"
_COUNTED: Final = "Apicurio counts the alternatives; Confluent's rules, and ours, look for one that takes each"
_ALTERNATIVE: Final = "Confluent's rules, and ours, compare a schema with the alternatives of a combination"
_WIDER: Final = "Confluent's rules, and ours, let a wider schema stand for one of a combination"
_NO_EFFECT: Final = "additionalItems has no effect without a list of items"
_NOT: Final = "Confluent's rules, and ours, compare the schemas below `not` the other way round"
_BOUNDS: Final = "Apicurio takes inclusive and exclusive bounds together; Confluent's rules, and ours, compare each"
_CONST: Final = "const, enum and combinations are different types in Confluent's rules, and in ours"
_PATTERNS: Final = (
    "Confluent's rules, and ours, do not compare patternProperties, and take an object with them for closed"
)
_NAMES: Final = "names are not part of Protobuf's encoding; Confluent's rules, and ours, compare fields by number"
_REMOVED: Final = "a reader skips fields it does not know; Confluent's rules, and ours, let fields go"
_ENCODED: Final = "the types have the same encoding, so that the reader decodes what was written"
_CONFLUENT: Final = "Confluent's rule; Apicurio's checks do not look at it"
EXPLAINED: Mapping[tuple[str, str, str], str] = {
    ("JSON", OURS, "COMBINED_TYPE_"): _COUNTED,
    ("JSON", OURS, "SUM_TYPE_NARROWED"): _COUNTED,
    ("JSON", OURS, "PRODUCT_TYPE_EXTENDED"): _COUNTED,
    ("JSON", OURS, "NOT_TYPE_EXTENDED"): _COUNTED,
    ("JSON", OURS, "MINIMUM_"): _BOUNDS,
    ("JSON", OURS, "MAXIMUM_"): _BOUNDS,
    ("JSON", OURS, "EXCLUSIVE_M"): _BOUNDS,
    ("JSON", OURS, "ITEM_"): _NO_EFFECT,
    ("JSON", OURS, "TYPE_CHANGED"): _CONST,
    ("JSON", OURS, "PROPERTY_REMOVED_FROM_CLOSED_CONTENT_MODEL"): _PATTERNS,
    ("JSON", THEIRS, "SUBSCHEMA_TYPE_CHANGED"): _ALTERNATIVE,
    ("JSON", THEIRS, "COMBINED_TYPE_"): _WIDER,
    ("JSON", THEIRS, "ARRAY_TYPE_ADDITIONAL_ITEMS_"): _NO_EFFECT,
    ("JSON", THEIRS, "ARRAY_TYPE_SCHEMA_OF_ADDITIONAL_ITEMS_"): _NO_EFFECT,
    ("JSON", THEIRS, "NOT_TYPE_SCHEMA_"): _NOT,
    ("JSON", THEIRS, "NUMBER_TYPE_"): _BOUNDS,
    ("JSON", THEIRS, "invalid"): "Apicurio's library fails on a combination that has another one with the same parts",
    ("PROTOBUF", THEIRS, "Field name changed"): _NAMES,
    ("PROTOBUF", THEIRS, "Field type changed"): _ENCODED,
    ("PROTOBUF", THEIRS, "Field label changed"): _ENCODED,
    ("PROTOBUF", THEIRS, "Conflict, field id changed"): _NAMES,
    ("PROTOBUF", THEIRS, "fields removed without reservation"): _REMOVED,
    ("PROTOBUF", THEIRS, "reserved fields were removed"): _REMOVED,
    ("PROTOBUF", THEIRS, "Conflict of reserved fields"): _REMOVED,
    ("PROTOBUF", OURS, "PACKAGE_CHANGED"): _CONFLUENT,
    ("PROTOBUF", OURS, "FIELD_MOVED_TO_EXISTING_ONEOF"): _CONFLUENT,
    ("PROTOBUF", OURS, "MULTIPLE_FIELDS_MOVED_TO_ONEOF"): _CONFLUENT,
    ("PROTOBUF", OURS, "ONEOF_FIELD_REMOVED"): _CONFLUENT,
    ("PROTOBUF", OURS, "invalid"): "protoc refuses the schema; the parser that Apicurio uses does not check it",
}
"""By type, the side that objects, and how its reason begins: why the other side does not object."""


def explain(side: str, reason: str, pair: Pair) -> str | None:
    """Return why only one side rejects the pair; None if the reason is unknown."""
    if pair.type == "JSON" and '"patternProperties"' in pair.reader + pair.writer:
        return _PATTERNS
    known = ((key, why) for key, why in EXPLAINED.items() if key[:2] == (pair.type, side))
    return next((why for (_, _, begins), why in known if reason.startswith(begins)), None)


_SCALARS_OF_JSON: Final = (None, True, False, 0, 1, 2, 3, 4, 5, 1.5, -1, "", "a", "b", "ab", "abc", "bbbbb")
_DOCUMENTS: Final[Sequence[Any]] = (
    *_SCALARS_OF_JSON,
    *([value] for value in _SCALARS_OF_JSON),
    *([1, value] for value in _SCALARS_OF_JSON),
    *([], ["a", "b", 1], [1, 2, 3, 4, 5], [[]], [{}], {}),
    *({name: value} for name in "abcdx" for value in _SCALARS_OF_JSON),
    *({"a": value, "b": other} for value in _SCALARS_OF_JSON[:9] for other in _SCALARS_OF_JSON[:9]),
    *({"a": value, "b": value, "c": value, "d": value, "x": value} for value in _SCALARS_OF_JSON),
)


def breaks(pair: Pair) -> bool:
    """Whether one of some documents is valid for the writer of JSON and not for the reader: proof against a pair."""
    reader, writer = (jsonschema_rs.validator_for(json.loads(text)) for text in (pair.reader, pair.writer))
    return any(writer.is_valid(document) and not reader.is_valid(document) for document in _DOCUMENTS)


def compare_type(schema_type: str, count: int, seed: int, *, show_all: bool) -> bool:
    """Decide the pairs of one type on both sides, print the disagreements, and tell whether one is unexplained."""
    pairs = make_pairs(schema_type, count, seed)
    theirs = decide_theirs(pairs)
    ours = [decide_ours(pair) for pair in pairs]
    agreed: Counter[str] = Counter()
    found_pairs: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair, our, their in zip(pairs, ours, theirs, strict=True):
        if bool(our.invalid) == bool(their.invalid) and bool(our.reasons) == bool(their.reasons):
            agreed["invalid" if our.invalid else "incompatible" if our.reasons else "compatible"] += 1
            continue
        side = OURS if our.reasons or our.invalid else THEIRS
        reasons = sorted((our if side == OURS else their).reasons) or ["invalid"]
        unknown = [reason for reason in reasons if explain(side, reason, pair) is None]
        why = f"UNEXPLAINED {unknown[0]}" if unknown else explain(side, reasons[0], pair) or ""
        found_pairs[side, why].append(pair)
    print(f"{schema_type}: {count} pairs, {sum(agreed.values())} decided alike ({dict(agreed)})")
    is_unexplained = False
    for (side, why), cases in sorted(found_pairs.items(), key=lambda item: -len(item[1])):
        is_unexplained |= why.startswith("UNEXPLAINED")
        proof = f", {sum(map(breaks, cases))} with a document that proves it" if schema_type == "JSON" else ""
        print(f"  {len(cases):>5}  only {side}{proof}: {why}")
        if show_all or why.startswith("UNEXPLAINED"):
            for pair in sorted(cases, key=lambda pair: len(pair.reader) + len(pair.writer))[:3]:
                print(f"           reader {pair.reader!r}\n           writer {pair.writer!r}")
    return is_unexplained


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.schema_pairs", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--pairs", type=int, default=PAIRS, help="pairs of each type")
    parser.add_argument("--seed", type=int, default=1, help="another seed gives other pairs")
    parser.add_argument("--type", choices=list(_MAKERS), help="only this type of schema")
    parser.add_argument("--all", action="store_true", help="show examples of explained differences, too")
    arguments = parser.parse_args()
    try:
        types = [arguments.type] if arguments.type else list(_MAKERS)
        unexplained = [
            compare_type(schema_type, arguments.pairs, arguments.seed, show_all=arguments.all) for schema_type in types
        ]
        return int(any(unexplained))
    except Unavailable as reason:
        print(f"skipped: {reason}")
        return 0


if __name__ == "__main__":
    sys.exit(main())
