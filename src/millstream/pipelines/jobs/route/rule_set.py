"""The rules of one topic, evaluated in one pass over its messages.

Conditions that compare a field with constants are indexed by value. Conditions that bound a number are found by two
binary searches: the numbers of a batch are sorted once, and the matches of a range are a slice of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from millstream.protocol.filter.batch import DecodedBatch
from millstream.protocol.filter.code import Program
from millstream.protocol.filter.filter import Filter
from millstream.protocol.filter.node import (
    Between,
    Column,
    Comparison,
    Header,
    Junction,
    Kind,
    Literal,
    Membership,
    Node,
    Payload,
    Uses,
    Value,
    canonical_text,
)
from millstream.protocol.filter.translation import translate
from millstream.protocol.filter.value import NUMBERS

Rows = npt.NDArray[np.int64]

EXACT_MAX: Final = 2**53
"""Integers up to here are exact as doubles. Larger ones are compared one by one."""

_SORTING_COSTS: Final = 32
"""Restoring a row's position costs about as much as this many comparisons."""

_TURNED: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


@dataclass(frozen=True, slots=True)
class NumberRange:
    """A numeric field that is between two inclusive bounds wherever the condition holds.

    Other values may be converted to numbers, so for messages that have one the condition is evaluated.
    """

    source: Payload
    low: float
    high: float
    is_all: bool
    """Whether the condition says nothing else."""


def number_range_of(parts: Sequence[Node]) -> NumberRange | None:
    """Return the bounds that conjuncts set on the first field that has any."""
    bounded = [(part, bounds) for part in parts if (bounds := _bounds(part)) is not None]
    if not bounded:
        return None
    source = bounded[0][1][0]
    mine = [(low, high) for _part, (of, low, high) in bounded if of == source]
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
    """The conditions that bound one field."""

    def __init__(self) -> None:
        self.members: list[int] = []
        self._low: list[float] = []
        self._high: list[float] = []

    def add(self, number: int, number_range: NumberRange) -> None:
        self.members.append(number)
        self._low.append(number_range.low)
        self._high.append(number_range.high)

    def within(self, column: Sequence[Any]) -> tuple[Iterator[tuple[int, Rows]], list[int]]:
        """Return for each condition the rows within its bounds, and the rows whose values are not such numbers."""
        rows: list[int] = []
        values: list[float] = []
        others: list[int] = []
        for row, value in enumerate(column):
            if type(value) in NUMBERS and -EXACT_MAX <= value <= EXACT_MAX:
                rows.append(row)
                values.append(value)
            elif value is not None:
                others.append(row)
        return self._slices(np.array(rows, np.int64), np.array(values, np.float64)), others

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


Source = Column | Header | Payload


@dataclass(frozen=True, slots=True)
class FieldValues:
    """A field that has one of several values wherever the condition holds.

    Values of other kinds may be converted to these, so for messages that have one the condition is evaluated.
    """

    source: Source
    kind: Kind
    values: tuple[Value, ...]
    is_all: bool
    """Whether the condition says nothing else."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A compiled condition, and the key under which it is indexed, if any."""

    filter: Filter
    index_key: FieldValues | NumberRange | None


def compile_condition(text: str) -> Condition:
    """Compile a condition; raise `FilterError`, which shows the position."""
    node = translate(text)
    program = Program(node)
    compiled = Filter(text, canonical_text(node), Uses.of((*program.columns, *program.of_batch)), program)
    return Condition(compiled, _index_key(node))


def _index_key(node: Node) -> FieldValues | NumberRange | None:
    parts = node.parts if isinstance(node, Junction) and node.operator == "AND" else (node,)
    keys = [key for part in parts for key in _compared_values(part, is_all=len(parts) == 1)]
    # Text is usually more selective than numbers.
    keys.sort(key=lambda key: key.kind is not Kind.TEXT)
    return keys[0] if keys else number_range_of(parts)


def _compared_values(part: Node, *, is_all: bool) -> Iterator[FieldValues]:
    match part:
        case Comparison(operator="=", left=Column() | Header() | Payload() as source, right=Literal() as literal):
            choices: tuple[Literal, ...] = (literal,)
        case Comparison(operator="=", left=Literal() as literal, right=Column() | Header() | Payload() as source):
            choices = (literal,)
        case Membership(operand=Column() | Header() | Payload() as source, choices=choices):
            pass
        case _:
            return
    kinds = {choice.kind for choice in choices}
    if len(kinds) == 1 and _fits(source, kind := kinds.pop()):
        yield FieldValues(source, kind, tuple(choice.value for choice in choices), is_all)


def _fits(source: Source, kind: Kind) -> bool:
    """Whether values can be looked up: text in any text field, numbers only in numeric ones."""
    if isinstance(source, Column) and source.name != "key":
        return False
    return kind is Kind.TEXT or (kind is Kind.NUMBER and isinstance(source, Payload))


RULE_SETS_KEPT: Final = 64
"""The number of rule sets that a process keeps compiled; each topic of a route has one."""

_KINDS: Final[dict[Kind, tuple[type, ...]]] = {Kind.TEXT: (str,), Kind.NUMBER: (int, float)}


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """The targets of messages that match a condition; an empty condition matches all."""

    condition: str
    targets: tuple[str, ...]


@dataclass(slots=True)
class _Index:
    """The conditions that compare one field with constants."""

    by_value: dict[Value, list[int]] = field(default_factory=dict)
    members: list[int] = field(default_factory=list)


class SelectedRows(DecodedBatch):
    """Some rows of a batch."""

    def __init__(self, batch: DecodedBatch, rows: Sequence[int]) -> None:
        super().__init__(topic=batch.topic, partition=batch.partition, uses=Uses())
        self._batch = batch
        self._rows = rows
        self._selected: dict[Source, list[Any]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, source: Column | Header | Payload) -> list[Any]:
        known = self._selected.get(source)
        if known is None:
            whole = self._batch.column(source)
            known = self._selected[source] = [whole[row] for row in self._rows]
        return known

    def _offsets(self) -> list[int]:
        return self.column(Column("offset", Kind.NUMBER))

    def _timestamps_ms(self) -> list[int]:
        return [at // 1000 for at in self.column(Column("timestamp", Kind.TIMESTAMP))]

    def _keys(self) -> list[str | None]:
        return self.column(Column("key", Kind.TEXT))

    def _payloads(self) -> Sequence[bytes | None]:
        raise NotImplementedError("fields are read from the batch that the rows belong to")

    def _headers(self, name: str) -> list[str | None]:
        return self.column(Header(name))


class RuleSet:
    """Rules, compiled and grouped by the fields they compare."""

    def __init__(self, routing_rules: Sequence[RoutingRule]) -> None:
        targets: dict[str, set[str]] = {}
        self._everything: set[str] = set()
        for way in routing_rules:
            if way.condition:
                targets.setdefault(way.condition, set()).update(way.targets)
            else:
                self._everything.update(way.targets)
        self._conditions: list[Condition] = [compile_condition(text) for text in targets]
        self._targets = [tuple(sorted(named)) for named in targets.values()]
        self._indexes: dict[tuple[Source, Kind], _Index] = {}
        self._ranges: dict[Payload, NumberRangeIndex] = {}
        self._whole: set[int] = set()
        """Conditions that the index decides completely."""
        self._others: list[int] = []
        for number, condition in enumerate(self._conditions):
            self._add(number, condition)
        self.uses: Uses = reduce(Uses.__or__, (condition.filter.uses for condition in self._conditions), Uses())
        """The parts of messages that the conditions read."""

    def matches(self, batch: DecodedBatch) -> dict[str, Rows]:
        """Return the rows of each target that gets any, in order."""
        rows_by_target: dict[str, list[Rows]] = {target: [np.arange(len(batch))] for target in self._everything}
        for number, rows in self._matching(batch):
            for target in self._targets[number]:
                rows_by_target.setdefault(target, []).append(rows)
        # Several rules may send a message to the same target, which gets it once.
        return {target: _together(several, len(batch)) for target, several in rows_by_target.items()}

    # -- internals ------------------------------------------------------------------------------------------------

    def _add(self, number: int, condition: Condition) -> None:
        key = condition.index_key
        if key is not None and key.is_all:
            self._whole.add(number)
        match key:
            case None:
                self._others.append(number)
            case NumberRange():
                self._ranges.setdefault(key.source, NumberRangeIndex()).add(number, key)
            case FieldValues():
                index = self._indexes.setdefault((key.source, key.kind), _Index())
                index.members.append(number)
                for value in dict.fromkeys(key.values):
                    index.by_value.setdefault(value, []).append(number)

    def _matching(self, batch: DecodedBatch) -> Iterator[tuple[int, Rows]]:
        for number in self._others:
            yield from self._evaluate_all(number, batch)
        for (source, kind), index in self._indexes.items():
            yield from self._looked_up(batch, source, kind, index)
        for source, number_ranges in self._ranges.items():
            yield from self._between(batch, source, number_ranges)

    def _looked_up(self, batch: DecodedBatch, source: Source, kind: Kind, index: _Index) -> Iterator[tuple[int, Rows]]:
        groups, others = _grouped(batch.column(source), _KINDS[kind], index.by_value)
        for value, rows in groups.items():
            values_by_name = SelectedRows(batch, rows)
            for number in index.by_value[value]:
                yield from self._evaluate(number, values_by_name, rows, is_certain=number in self._whole)
        yield from self._evaluate_unindexed(index.members, batch, others)

    def _between(
        self, batch: DecodedBatch, source: Payload, number_ranges: NumberRangeIndex
    ) -> Iterator[tuple[int, Rows]]:
        within, others = number_ranges.within(batch.column(source))
        for number, rows in within:
            if number in self._whole:
                yield number, rows
            elif 2 * rows.size > len(batch):
                # Picking most of a batch takes longer than evaluating all of it, odd rows included.
                yield from self._evaluate_all(number, batch)
            else:
                chosen = rows.tolist()
                yield from self._evaluate(number, SelectedRows(batch, chosen), chosen, is_certain=False)
        yield from self._evaluate_unindexed(number_ranges.members, batch, others)

    def _evaluate_all(self, number: int, batch: DecodedBatch) -> Iterator[tuple[int, Rows]]:
        rows = np.flatnonzero(self._conditions[number].filter.matches(batch))
        if rows.size:
            yield number, rows

    def _evaluate_unindexed(
        self, members: Sequence[int], batch: DecodedBatch, others: Sequence[int]
    ) -> Iterator[tuple[int, Rows]]:
        if others:
            values_by_name = SelectedRows(batch, others)
            for number in members:
                yield from self._evaluate(number, values_by_name, others, is_certain=False)

    def _evaluate(
        self, number: int, values_by_name: SelectedRows, rows: Sequence[int], *, is_certain: bool
    ) -> Iterator[tuple[int, Rows]]:
        numbers: Rows = np.array(rows, np.int64)
        if not is_certain:
            numbers = numbers[self._conditions[number].filter.matches(values_by_name)]
        if numbers.size:
            yield number, numbers


@lru_cache(maxsize=RULE_SETS_KEPT)
def rule_set(routing_rules: tuple[RoutingRule, ...]) -> RuleSet:
    """Return the compiled rules, once per process."""
    return RuleSet(routing_rules)


def _together(several: Sequence[Rows], size: int) -> Rows:
    """Merge several row sets, in order and without duplicates."""
    if len(several) == 1:
        return several[0]
    is_among = np.zeros(size, np.bool_)
    for rows in several:
        is_among[rows] = True
    return np.flatnonzero(is_among)


def _grouped(
    column: Sequence[Any], kinds: tuple[type, ...], rules_by_value: dict[Value, list[int]]
) -> tuple[dict[Value, list[int]], list[int]]:
    """Return the rows of each value that has rules, and the rows whose value is of another kind."""
    groups: dict[Value, list[int]] = {}
    others: list[int] = []
    for row, value in enumerate(column):
        if type(value) in kinds:
            if value in rules_by_value:
                groups.setdefault(value, []).append(row)
        elif value is not None:
            others.append(row)
    return groups, others
