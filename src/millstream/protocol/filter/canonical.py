"""The one way to write a filter: what was said in different words, spaces and parentheses gets the same text.

It is itself a filter that means the same, here and in Spark.
"""

from __future__ import annotations

from millstream.protocol.filter.like_pattern import ESCAPE
from millstream.protocol.filter.node import (
    HEADERS,
    PAYLOAD,
    Arithmetic,
    Between,
    Call,
    Cast,
    Column,
    Comparison,
    Header,
    IsNull,
    IsTruth,
    Junction,
    Kind,
    Like,
    Literal,
    Membership,
    Negative,
    Node,
    Not,
    Payload,
)
from millstream.protocol.filter.value import moment_text

_ESCAPED = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\0", "\x1a": "\\Z", "\b": "\\b"}


def canonical_text(node: Node) -> str:
    """The text of a filter."""
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
    """With an exponent, since Spark takes what has none for a decimal."""
    text = repr(value)
    return text if "e" in text else f"{text}e0"


def quoted(text: str) -> str:
    """A text as a literal."""
    return "'" + "".join(_ESCAPED.get(character, character) for character in text) + "'"
