"""What a filter says, as a tree of its own: small, typed, and free of the parser that it came from.

Every node has a kind, as far as it is known before a message is seen. What a message's payload holds is known only
then, so its kind is `ANY`. A moment in time is a whole number of microseconds since 1970 in UTC.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a value is."""

    TEXT = "text"
    NUMBER = "a number"
    BOOLEAN = "a boolean"
    TIMESTAMP = "a timestamp"
    ANY = "a field of the payload"
    NULL = "NULL"


Step = str | int
Path = tuple[Step, ...]
"""The way to a field of the payload: names of fields and positions in arrays."""

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Literal:
    """A value that stands in the text."""

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
    """NOT."""

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
    """Between two bounds, both included."""

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
    """LIKE with a pattern that stands in the text."""

    operand: Node
    pattern: str
    escape: str


@dataclass(frozen=True, slots=True)
class IsNull:
    """IS NULL."""

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
    """The minus sign before an operand."""

    operand: Node


@dataclass(frozen=True, slots=True)
class Call:
    """A function of the list."""

    function: str
    arguments: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Cast:
    """CAST to a type of the list."""

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
"""The kind of a function's answer and the number of its arguments; `coalesce` is told apart by its arguments."""

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
    """The kind of a node's value."""
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
    """The kind that all have, NULL left aside; `ANY` where they differ."""
    known = {kind for kind in kinds if kind is not Kind.NULL}
    if not known:
        return Kind.NULL
    return known.pop() if len(known) == 1 else Kind.ANY
