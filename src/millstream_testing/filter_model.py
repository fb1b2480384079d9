"""A reference model of filters, as simple as possible: one value at a time, sharing no code with the implementation.

A `Term` is a part of a filter: its text, and its value for a message. Tests combine random terms and compare the real
filters with them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Truth = bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    key: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    payload: Any = None


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a filter."""

    text: str
    of: Callable[[Row], Any]


def literal_text(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return f"({value!r})" if value < 0 else repr(value)


def field_at(row: Row, path: Sequence[str | int]) -> Any:
    found = row.payload
    for step in path:
        if isinstance(step, str):
            found = found.get(step) if isinstance(found, dict) else None
        else:
            found = found[step] if isinstance(found, list) and step < len(found) else None
    return found


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "text" if isinstance(value, str) else "other"


def _as_number(text: str, *, is_whole: bool) -> int | float | None:
    if is_whole:
        if not re.fullmatch(r"[+-]?\d+", text.strip(), re.ASCII):
            return None
        number = int(text)
        return number if -(2**63) <= number < 2**63 else None
    try:
        return float(text) if not re.search(r"[a-df-zA-DF-Z_]", text) else None
    except ValueError:
        return None


def _as_boolean(text: str) -> Truth:
    return {"true": True, "t": True, "yes": True, "y": True, "1": True}.get(
        text.strip().lower(),
        {"false": False, "f": False, "no": False, "n": False, "0": False}.get(text.strip().lower()),
    )


def _like_other(text: str, other: Any) -> Any:
    """Convert a text for a comparison."""
    if _kind(other) == "number":
        return _as_number(text, is_whole=isinstance(other, int))
    return _as_boolean(text) if _kind(other) == "boolean" else None


def compare(operator: str, left: Any, right: Any) -> Truth:
    """= <> < <= > >=."""
    if _kind(left) == "text" != _kind(right):
        left = _like_other(left, right)
    elif _kind(right) == "text" != _kind(left):
        right = _like_other(right, left)
    if left is None or right is None or _kind(left) != _kind(right) or _kind(left) == "other":
        return None
    if operator in ("=", "<>"):
        return bool(left == right) == (operator == "=")
    if operator in ("<", ">="):
        return bool(left < right) == (operator == "<")
    return bool(left > right) == (operator == ">")


def conjunction(left: Truth, right: Truth) -> Truth:
    """AND, by its truth table."""
    table = {(True, True): True, (True, None): None, (None, True): None, (None, None): None}
    return table.get((left, right), False)


def negation(operand: Any) -> Truth:
    """NOT, by its truth table."""
    table: dict[Truth, Truth] = {True: False, False: True, None: None}
    return table[truth(operand)]


def disjunction(left: Truth, right: Truth) -> Truth:
    """OR, by De Morgan."""
    return negation(conjunction(negation(left), negation(right)))


def truth(value: Any) -> Truth:
    """Return a value where a condition is required."""
    return value if isinstance(value, bool) else None


def member(operand: Any, choices: Sequence[Any]) -> Truth:
    """IN: a chain of ORs."""
    if any(isinstance(choice, float) for choice in choices) and isinstance(operand, str):
        choices = [float(choice) if isinstance(choice, int) else choice for choice in choices]
    found: Truth = False
    for choice in choices:
        found = disjunction(found, compare("=", operand, choice))
    return found


def like(operand: Any, pattern: str) -> Truth:
    """LIKE without an escape, character by character."""
    text = as_text(operand)
    return None if text is None else _like(text, pattern)


def _like(text: str, pattern: str) -> bool:
    """Track which prefixes of the text match the pattern so far, character by character of the pattern."""
    reached = {0}
    for letter in pattern:
        if letter == "%":
            reached = set(range(min(reached, default=len(text) + 1), len(text) + 1))
        else:
            reached = {at + 1 for at in reached if at < len(text) and letter in ("_", text[at])}
    return len(text) in reached


def as_text(value: Any) -> str | None:
    """Return a value where a text is required; numbers with a fraction are left to other tests."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, str | int) else None


def calculate(operator: str, left: Any, right: Any) -> int | float | None:
    """Arithmetic of numbers, and of a number with a text."""
    if isinstance(left, str) and isinstance(right, str):
        return None
    if isinstance(left, str):
        left = _as_number(left, is_whole=isinstance(right, int) and not isinstance(right, bool))
    if isinstance(right, str):
        right = _as_number(right, is_whole=isinstance(left, int) and not isinstance(left, bool))
    if _kind(left) != "number" or _kind(right) != "number":
        return None
    if operator == "/":
        return None if right == 0 else left / right
    found: int | float = {"+": left + right, "-": left - right, "*": left * right}[operator]
    return found if not isinstance(found, int) or -(2**63) <= found < 2**63 else None
