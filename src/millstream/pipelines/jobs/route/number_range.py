"""Conditions that hold only where a number of the payload lies between bounds, all of them asked by two searches.

The numbers of a batch are sorted once; what lies between two bounds is then a slice of them, whatever the condition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from millstream.protocol.filter.node import Between, Comparison, Kind, Literal, Node, Payload
from millstream.protocol.filter.value import NUMBERS

Rows = npt.NDArray[np.int64]

EXACT_MAX: Final = 2**53
"""Whole numbers up to here are the same as doubles. Larger ones are compared one by one."""

_SORTING_COSTS: Final = 32
"""To put a row back into its place takes about as long as so many comparisons."""

_TURNED: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


@dataclass(frozen=True, slots=True)
class NumberRange:
    """A field that lies between two bounds, both included, wherever the condition holds, if it is a number.

    What is no number may be taken for one, so for messages that have such a value the condition is evaluated.
    """

    source: Payload
    low: float
    high: float
    is_all: bool
    """Whether the condition says nothing else."""


def number_range_of(parts: Sequence[Node]) -> NumberRange | None:
    """The bounds that the parts of a condition, which hold together, set to the first field that has any."""
    found = [(part, bounds) for part in parts if (bounds := _bounds(part)) is not None]
    if not found:
        return None
    source = found[0][1][0]
    mine = [(low, high) for _part, (of, low, high) in found if of == source]
    low, high = max(low for low, _high in mine), min(high for _low, high in mine)
    return NumberRange(source, low, high, is_all=len(mine) == len(parts))


def _bounds(part: Node) -> tuple[Payload, float, float] | None:
    match part:
        case Comparison(operator=operator, left=Payload() as source, right=Literal() as literal):
            pass
        case Comparison(operator=operator, left=Literal() as literal, right=Payload() as source):
            operator = _TURNED.get(operator, operator)
        case Between(operand=Payload() as source, low=Literal() as low, high=Literal() as high):
            if (at_least := _number(low)) is None or (at_most := _number(high)) is None:
                return None
            return source, at_least, at_most
        case _:
            return None
    number = _number(literal)
    if number is None:
        return None
    match operator:
        case ">":
            return source, math.nextafter(number, math.inf), math.inf
        case ">=":
            return source, number, math.inf
        case "<":
            return source, -math.inf, math.nextafter(number, -math.inf)
        case "<=":
            return source, -math.inf, number
    return None


def _number(literal: Literal) -> float | None:
    if literal.kind is not Kind.NUMBER or type(literal.value) not in NUMBERS:
        return None
    value: Any = literal.value
    return float(value) if -EXACT_MAX <= value <= EXACT_MAX else None


class NumberRangeIndex:
    """The conditions that set bounds to one field."""

    def __init__(self) -> None:
        self.members: list[int] = []
        self._low: list[float] = []
        self._high: list[float] = []

    def add(self, number: int, number_range: NumberRange) -> None:
        """Take the condition of a number."""
        self.members.append(number)
        self._low.append(number_range.low)
        self._high.append(number_range.high)

    def within(self, column: Sequence[Any]) -> tuple[Iterator[tuple[int, Rows]], list[int]]:
        """For each condition the rows that lie within its bounds, and rows whose values are no such numbers."""
        rows: list[int] = []
        values: list[float] = []
        odd: list[int] = []
        for row, value in enumerate(column):
            if type(value) in NUMBERS and -EXACT_MAX <= value <= EXACT_MAX:
                rows.append(row)
                values.append(value)
            elif value is not None:
                odd.append(row)
        return self._slices(np.array(rows, np.int64), np.array(values, np.float64)), odd

    def _slices(self, rows: Rows, values: npt.NDArray[np.float64]) -> Iterator[tuple[int, Rows]]:
        order = np.argsort(values)
        ascending = values[order]
        starts = np.searchsorted(ascending, self._low, "left").tolist()
        ends = np.searchsorted(ascending, self._high, "right").tolist()
        for at, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if start >= end:
                continue
            if (end - start) * _SORTING_COSTS < len(values):
                yield self.members[at], rows[np.sort(order[start:end])]
            else:
                yield self.members[at], rows[(values >= self._low[at]) & (values <= self._high[at])]
