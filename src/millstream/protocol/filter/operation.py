"""The operations of a filter on single values, with NULL as in SQL.

None is NULL; nothing here raises. Values of different kinds are compared as in Spark: text is converted to the kind of
the other side. Where that is impossible, and where Spark would fail (division by zero, overflow), the result is None.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from millstream.protocol.filter.value import INT64_MAX, NUMBERS, boolean, double, finite, parse_integer, text_of

SCALARS = frozenset({str, int, float, bool})
Truth = bool | None

COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
FROM_TEXT: dict[type, Callable[[str], Any]] = {int: parse_integer, float: double, bool: boolean}


def aligned(left: Any, right: Any) -> tuple[Any, Any] | None:
    """Convert both to comparable values, or return None."""
    left_class, right_class = left.__class__, right.__class__
    if left_class is right_class:
        return (left, right) if left_class in SCALARS else None
    if left_class in NUMBERS and right_class in NUMBERS:
        return left, right
    if left_class is str and right_class in FROM_TEXT:
        left = FROM_TEXT[right_class](left)
    elif right_class is str and left_class in FROM_TEXT:
        right = FROM_TEXT[left_class](right)
    else:
        return None
    return None if left is None or right is None else (left, right)


def comparison(symbol: str) -> Callable[[Any, Any], Truth]:
    """Return the function that compares two values of any kind."""
    compare = COMPARE[symbol]

    def compared(left: Any, right: Any) -> Truth:
        pair = aligned(left, right)
        return None if pair is None else compare(*pair)

    return compared


def plain_comparison(symbol: str) -> Callable[[Any, Any], Truth]:
    """Return the function that compares two values of one kind."""
    compare = COMPARE[symbol]

    def compared(left: Any, right: Any) -> Truth:
        return None if left is None or right is None else compare(left, right)

    return compared


def between(operand: Any, low: Any, high: Any, compare: tuple[Callable[..., Truth], Callable[..., Truth]]) -> Truth:
    """BETWEEN, given the two functions that compare with the bounds."""
    return conjunction(compare[0](operand, low), compare[1](operand, high))


def negation(operand: Any) -> Truth:
    return not operand if operand.__class__ is bool else None


def conjunction(*parts: Any) -> Truth:
    if any(part is False for part in parts):
        return False
    return True if all(part is True for part in parts) else None


def disjunction(*parts: Any) -> Truth:
    if any(part is True for part in parts):
        return True
    return False if all(part is False for part in parts) else None


def like(operand: Any, matches: Callable[[str], bool]) -> Truth:
    text = text_of(operand)
    return None if text is None else matches(text)


def is_truth(operand: Any, truth: bool) -> bool:
    """IS TRUE and IS FALSE."""
    return operand is truth


def is_null(operand: Any) -> bool:
    return operand is None


def coalesce(*values: Any) -> Any:
    """Return the first value that is not NULL."""
    return next((value for value in values if value is not None), None)


def lower(operand: Any) -> str | None:
    text = text_of(operand)
    return None if text is None else text.lower()


def upper(operand: Any) -> str | None:
    text = text_of(operand)
    return None if text is None else text.upper()


def length(operand: Any) -> int | None:
    text = text_of(operand)
    return None if text is None else len(text)


def startswith(operand: Any, part: Any) -> Truth:
    text, other = text_of(operand), text_of(part)
    return None if text is None or other is None else text.startswith(other)


def endswith(operand: Any, part: Any) -> Truth:
    text, other = text_of(operand), text_of(part)
    return None if text is None or other is None else text.endswith(other)


def contains(operand: Any, part: Any) -> Truth:
    text, other = text_of(operand), text_of(part)
    return None if text is None or other is None else other in text


def _numbers(left: Any, right: Any) -> tuple[Any, Any] | None:
    """Convert both to numbers, or return None."""
    left_class, right_class = left.__class__, right.__class__
    if left_class is str and right_class in NUMBERS:
        left = FROM_TEXT[right_class](left)
    elif right_class is str and left_class in NUMBERS:
        right = FROM_TEXT[left_class](right)
    return (left, right) if left.__class__ in NUMBERS and right.__class__ in NUMBERS else None


def arithmetic(symbol: str) -> Callable[[Any, Any], int | float | None]:
    calculate = _CALCULATE[symbol]

    def calculated(left: Any, right: Any) -> int | float | None:
        pair = _numbers(left, right)
        if pair is None:
            return None
        try:
            result = calculate(*pair)
        except (OverflowError, ZeroDivisionError):
            return None
        return _fitting(result)

    return calculated


def _fitting(result: Any) -> int | float | None:
    if result.__class__ is int:
        return result if -INT64_MAX - 1 <= result <= INT64_MAX else None
    return finite(result)


def _divide(left: Any, right: Any) -> float:
    return float(left) / float(right)


def _remainder(left: Any, right: Any) -> int | float:
    """Keep the sign of the dividend, as in SQL and Java."""
    if left.__class__ is int and right.__class__ is int:
        rest: int = abs(left) % abs(right)
        return -rest if left < 0 else rest
    if right == 0:
        raise ZeroDivisionError
    return math.fmod(left, right)


_CALCULATE: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
    "%": _remainder,
}


def negative(operand: Any) -> int | float | None:
    number: Any = double(operand) if operand.__class__ is str else operand
    return _fitting(-number) if isinstance(number, int | float) and not isinstance(number, bool) else None
