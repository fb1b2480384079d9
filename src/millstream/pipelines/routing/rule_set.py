"""The rules of one topic, all of them asked in one pass over its messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from millstream.pipelines.routing.condition import Condition, Source, compile_condition
from millstream.subscriptions.filter.batch import DecodedBatch
from millstream.subscriptions.filter.node import Column, Header, Kind, Payload, Value
from millstream.subscriptions.filter.uses import Uses

Rows = npt.NDArray[np.int64]

RULE_SETS_KEPT: Final = 64
"""How many sets a process keeps compiled; each topic of a route is one."""

_KINDS: Final[dict[Kind, tuple[type, ...]]] = {Kind.TEXT: (str,), Kind.NUMBER: (int, float)}


@dataclass(frozen=True, slots=True)
class Way:
    """Where messages go for which a condition holds; an empty condition holds for all."""

    condition: str
    targets: tuple[str, ...]


@dataclass(slots=True)
class _Index:
    """The conditions that name values of one field."""

    by_value: dict[Value, list[int]] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    members: list[int] = field(default_factory=list)


class Picked(DecodedBatch):
    """Some rows of a batch."""

    def __init__(self, batch: DecodedBatch, rows: Sequence[int]) -> None:
        super().__init__(topic=batch.topic, partition=batch.partition, uses=Uses())
        self._batch = batch
        self._rows = rows
        self._picked: dict[Source, list[Any]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, source: Column | Header | Payload) -> list[Any]:
        """The values of one source, for these rows."""
        known = self._picked.get(source)
        if known is None:
            whole = self._batch.column(source)
            known = self._picked[source] = [whole[row] for row in self._rows]
        return known

    def _offsets(self) -> list[int]:
        return self.column(Column("offset", Kind.NUMBER))

    def _timestamps_ms(self) -> list[int]:
        return [at // 1000 for at in self.column(Column("timestamp", Kind.TIMESTAMP))]

    def _keys(self) -> list[str | None]:
        return self.column(Column("key", Kind.TEXT))

    def _payloads(self) -> Sequence[bytes | None]:
        raise NotImplementedError("fields are taken from the batch that rows were picked of")

    def _headers(self, name: str) -> list[str | None]:
        return self.column(Header(name))


class RuleSet:
    """Rules, compiled and grouped by what they name."""

    def __init__(self, ways: Sequence[Way]) -> None:
        targets: dict[str, set[str]] = {}
        self._everything: set[str] = set()
        for way in ways:
            if way.condition:
                targets.setdefault(way.condition, set()).update(way.targets)
            else:
                self._everything.update(way.targets)
        self._conditions: list[Condition] = [compile_condition(text) for text in targets]
        self._targets = [tuple(sorted(named)) for named in targets.values()]
        self._indexes: dict[tuple[Source, Kind], _Index] = {}
        self._others: list[int] = []
        for number, condition in enumerate(self._conditions):
            self._add(number, condition)
        self.uses: Uses = reduce(Uses.__or__, (one.filter.uses for one in self._conditions), Uses())
        """What all of them read together."""

    def matches(self, batch: DecodedBatch) -> dict[str, Rows]:
        """For every target that gets something, which messages it gets, in their order."""
        found: dict[str, list[Rows]] = {target: [np.arange(len(batch))] for target in self._everything}
        for number, rows in self._matching(batch):
            for target in self._targets[number]:
                found.setdefault(target, []).append(rows)
        # Several rules may send a message to the same target, which gets it once.
        return {
            target: several[0] if len(several) == 1 else np.unique(np.concatenate(several))
            for target, several in found.items()
        }

    # -- how ------------------------------------------------------------------------------------------------------

    def _add(self, number: int, condition: Condition) -> None:
        handle = condition.handle
        if handle is None:
            self._others.append(number)
            return
        index = self._indexes.setdefault((handle.source, handle.kind), _Index())
        index.members.append(number)
        if handle.is_all:
            index.whole.add(number)
        for value in dict.fromkeys(handle.values):
            index.by_value.setdefault(value, []).append(number)

    def _matching(self, batch: DecodedBatch) -> Iterator[tuple[int, Rows]]:
        for number in self._others:
            rows = np.flatnonzero(self._conditions[number].filter.matches(batch))
            if rows.size:
                yield number, rows
        for (source, kind), index in self._indexes.items():
            yield from self._looked_up(batch, source, kind, index)

    def _looked_up(self, batch: DecodedBatch, source: Source, kind: Kind, index: _Index) -> Iterator[tuple[int, Rows]]:
        groups, odd = _grouped(batch.column(source), _KINDS[kind], index.by_value)
        for value, rows in groups.items():
            picked = Picked(batch, rows)
            for number in index.by_value[value]:
                yield from self._ask(number, picked, rows, is_sure=number in index.whole)
        if odd:
            picked = Picked(batch, odd)
            for number in index.members:
                yield from self._ask(number, picked, odd, is_sure=False)

    def _ask(self, number: int, picked: Picked, rows: Sequence[int], *, is_sure: bool) -> Iterator[tuple[int, Rows]]:
        numbers: Rows = np.array(rows, np.int64)
        if not is_sure:
            numbers = numbers[self._conditions[number].filter.matches(picked)]
        if numbers.size:
            yield number, numbers


@lru_cache(maxsize=RULE_SETS_KEPT)
def rule_set(ways: tuple[Way, ...]) -> RuleSet:
    """The rules, compiled once in a process however many batches there are."""
    return RuleSet(ways)


def _grouped(
    column: Sequence[Any], kinds: tuple[type, ...], wanted: dict[Value, list[int]]
) -> tuple[dict[Value, list[int]], list[int]]:
    """The rows of each wanted value, and those whose value is of another kind."""
    groups: dict[Value, list[int]] = {}
    odd: list[int] = []
    for row, value in enumerate(column):
        if type(value) in kinds:
            if value in wanted:
                groups.setdefault(value, []).append(row)
        elif value is not None:
            odd.append(row)
    return groups, odd
