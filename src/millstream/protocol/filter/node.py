"""The expression tree of a filter: small, typed, and independent of the parser.

Every node has a kind, if it is known before evaluation. The kind of a payload field is `ANY`. A timestamp
is a number of microseconds since 1970 in UTC. `canonical_text` writes a tree as the one text that all spellings of the
same filter share; it is itself a valid filter, here and in Spark.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from millstream.protocol.filter.value import ESCAPE, moment_text


class Kind(StrEnum):
    TEXT = "text"
    NUMBER = "a number"
    BOOLEAN = "a boolean"
    TIMESTAMP = "a timestamp"
    ANY = "a field of the payload"
    NULL = "NULL"


Step = str | int
Path = tuple[Step, ...]
"""The path of a payload field: names of fields and positions in arrays."""

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Literal:
    value: Value
    kind: Kind


@dataclass(frozen=True, slots=True)
class Column:
    """A column that every message has."""

    name: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Header:
    """The last header of a name, as text."""

    name: str


@dataclass(frozen=True, slots=True)
class Payload:
    """A field of the JSON payload; the payload itself if the path is empty."""

    path: Path


@dataclass(frozen=True, slots=True)
class Not:
    operand: Node


@dataclass(frozen=True, slots=True)
class Junction:
    """AND or OR over two or more parts."""

    operator: str
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One of = <> < <= > >=."""

    operator: str
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Between:
    """BETWEEN, both bounds included."""

    operand: Node
    low: Node
    high: Node


@dataclass(frozen=True, slots=True)
class Membership:
    """IN a list of literals, all of one kind but for NULL."""

    operand: Node
    choices: tuple[Literal, ...]


@dataclass(frozen=True, slots=True)
class Like:
    """LIKE with a literal pattern."""

    operand: Node
    pattern: str
    escape: str


@dataclass(frozen=True, slots=True)
class IsNull:
    operand: Node


@dataclass(frozen=True, slots=True)
class IsTruth:
    """IS TRUE or IS FALSE."""

    operand: Node
    truth: bool


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """One of + - * / %."""

    operator: str
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Negative:
    """Unary minus."""

    operand: Node


@dataclass(frozen=True, slots=True)
class Call:
    function: str
    arguments: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Cast:
    operand: Node
    target: str


Node = (
    Literal | Column | Header | Payload | Not | Junction | Comparison | Between | Membership | Like | IsNull | IsTruth
    | Arithmetic | Negative | Call | Cast
)  # fmt: skip

COLUMNS = {
    "key": Kind.TEXT,
    "topic": Kind.TEXT,
    "partition": Kind.NUMBER,
    "offset": Kind.NUMBER,
    "timestamp": Kind.TIMESTAMP,
}
HEADERS, PAYLOAD = "headers", "payload"

FUNCTIONS = {
    "lower": (Kind.TEXT, 1),
    "upper": (Kind.TEXT, 1),
    "length": (Kind.NUMBER, 1),
    "startswith": (Kind.BOOLEAN, 2),
    "endswith": (Kind.BOOLEAN, 2),
    "contains": (Kind.BOOLEAN, 2),
}
"""The result kind and the number of arguments of each function; the kind of `coalesce` depends on its arguments."""

COALESCE = "coalesce"

CASTS = {
    "STRING": Kind.TEXT,
    "BIGINT": Kind.NUMBER,
    "INT": Kind.NUMBER,
    "DOUBLE": Kind.NUMBER,
    "BOOLEAN": Kind.BOOLEAN,
    "TIMESTAMP": Kind.TIMESTAMP,
}


def kind_of(node: Node) -> Kind:
    match node:
        case Literal() | Column():
            return node.kind
        case Header():
            return Kind.TEXT
        case Payload():
            return Kind.ANY
        case Arithmetic() | Negative():
            return Kind.NUMBER
        case Cast():
            return CASTS[node.target]
        case Call(function=name) if name == COALESCE:
            return common_kind([kind_of(argument) for argument in node.arguments])
        case Call():
            return FUNCTIONS[node.function][0]
        case _:
            return Kind.BOOLEAN


def common_kind(kinds: list[Kind]) -> Kind:
    """Return the kind that all have, ignoring NULL; `ANY` where they differ."""
    known = {kind for kind in kinds if kind is not Kind.NULL}
    if not known:
        return Kind.NULL
    return known.pop() if len(known) == 1 else Kind.ANY


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """The parts of a message that filters read, so that nothing else is decoded."""

    key: bool = False
    headers: frozenset[str] = frozenset()
    paths: frozenset[Path] = frozenset()
    """Fields of the payload; the empty path is the payload itself."""

    @property
    def payload(self) -> bool:
        return bool(self.paths)

    @property
    def fields(self) -> frozenset[str]:
        """Return the record fields that must be decoded, by the codec's names."""
        usage = {"key": self.key, "headers": bool(self.headers), "value": self.payload}
        return frozenset(name for name, is_used in usage.items() if is_used)

    def __or__(self, other: Uses) -> Uses:
        return Uses(key=self.key or other.key, headers=self.headers | other.headers, paths=self.paths | other.paths)

    @staticmethod
    def of(sources: Iterable[Column | Header | Payload]) -> Uses:
        """Return the parts that these sources need."""
        listed = list(sources)
        return Uses(
            key=any(isinstance(source, Column) and source.name == "key" for source in listed),
            headers=frozenset(source.name for source in listed if isinstance(source, Header)),
            paths=frozenset(source.path for source in listed if isinstance(source, Payload)),
        )


_ESCAPED = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\0", "\x1a": "\\Z", "\b": "\\b"}


def canonical_text(node: Node) -> str:
    match node:
        case Literal():
            return _literal(node)
        case Column():
            return node.name
        case Header():
            return f"{HEADERS}[{quoted(node.name)}]"
        case Payload():
            return PAYLOAD + "".join(f"[{step if isinstance(step, int) else quoted(step)}]" for step in node.path)
        case Not():
            return f"NOT {_operand(node.operand)}"
        case Junction():
            return f" {node.operator} ".join(map(_operand, node.parts))
        case Comparison() | Arithmetic():
            return f"{_operand(node.left)} {node.operator} {_operand(node.right)}"
        case Between():
            return f"{_operand(node.operand)} BETWEEN {_operand(node.low)} AND {_operand(node.high)}"
        case Membership():
            return f"{_operand(node.operand)} IN ({', '.join(map(_literal, node.choices))})"
        case Like():
            escape = "" if node.escape == ESCAPE else f" ESCAPE {quoted(node.escape)}"
            return f"{_operand(node.operand)} LIKE {quoted(node.pattern)}{escape}"
        case IsNull():
            return f"{_operand(node.operand)} IS NULL"
        case IsTruth():
            return f"{_operand(node.operand)} IS {'TRUE' if node.truth else 'FALSE'}"
        case Negative():
            return f"- {_operand(node.operand)}"
        case Call():
            return f"{node.function}({', '.join(map(canonical_text, node.arguments))})"
        case Cast():
            return f"CAST({canonical_text(node.operand)} AS {node.target})"


def _operand(node: Node) -> str:
    text = canonical_text(node)
    return text if isinstance(node, Literal | Column | Header | Payload | Call | Cast) else f"({text})"


def _literal(node: Literal) -> str:
    value = node.value
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, str):
        return quoted(value)
    if node.kind is Kind.TIMESTAMP:
        return f"TIMESTAMP {quoted(moment_text(int(value)))}"
    return _double(value) if isinstance(value, float) else str(value)


def _double(value: float) -> str:
    """Write an exponent, since Spark reads a number without one as a decimal."""
    text = repr(value)
    return text if "e" in text else f"{text}e0"


def quoted(text: str) -> str:
    """Write a string literal."""
    return "'" + "".join(_ESCAPED.get(character, character) for character in text) + "'"
