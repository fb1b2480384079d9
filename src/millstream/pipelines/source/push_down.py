"""Conditions of a batch query on topic, partition, offset and timestamp, taken over by the fetch.

Spark refuses a reader that defines `pushFilters` while `spark.sql.python.filterPushdown.enabled` is off, which it is
unless somebody turns it on, and a reader cannot see the setting. It looks for the method itself, so what readers have
here is an object that can be called and answers, when looked at, as the method that does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

_UNBOUND: Final = 2**63 - 1


@dataclass(slots=True)
class Bounds:
    """What is left to read by the conditions that were taken over."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    first_offset: int = 0
    end_offset: int = _UNBOUND
    from_ms: int | None = None
    partition_first: int = 0
    partition_end: int = _UNBOUND

    def allow(self, topic: str, partition: int) -> bool:
        """Whether a partition can have rows that are wanted."""
        return (
            (self.topics is None or topic in self.topics)
            and (self.partitions is None or partition in self.partitions)
            and self.partition_first <= partition < self.partition_end
        )

    def take(self, one: Filter) -> bool:
        """Take a condition over; False if Spark has to look at every row all the same."""
        attribute: tuple[str, ...] = getattr(one, "attribute", ())
        value: Any = getattr(one, "value", None)
        if len(attribute) != 1 or value is None:
            return False
        if attribute[0] == "topic":
            return self._take_topic(one, value)
        if attribute[0] == "partition":
            return self._take_partition(one, value)
        if attribute[0] == "offset":
            return self._take_offset(one, value)
        if (
            attribute[0] == "timestamp"
            and isinstance(value, datetime)
            and isinstance(one, GreaterThan | GreaterThanOrEqual)
        ):
            # Later records may be older, so this only saves what lies before the first that is young enough.
            self.from_ms = max(self.from_ms or 0, int(value.timestamp() * 1000))
        return False

    def _take_topic(self, one: Filter, value: Any) -> bool:
        wanted = _values(one, value)
        if wanted is None:
            return False
        self.topics = wanted if self.topics is None else self.topics & wanted
        return True

    def _take_partition(self, one: Filter, value: Any) -> bool:
        wanted = _values(one, value)
        if wanted is not None:
            self.partitions = wanted if self.partitions is None else self.partitions & wanted
            return True
        bounds = _bounds(one, value)
        if bounds is None:
            return False
        self.partition_first = max(self.partition_first, bounds[0])
        self.partition_end = min(self.partition_end, bounds[1])
        return True

    def _take_offset(self, one: Filter, value: Any) -> bool:
        bounds = (value, value + 1) if isinstance(one, EqualTo) else _bounds(one, value)
        if bounds is None:
            return False
        self.first_offset = max(self.first_offset, bounds[0])
        self.end_offset = min(self.end_offset, bounds[1])
        return True


def _values(one: Filter, value: Any) -> frozenset[Any] | None:
    if isinstance(one, EqualTo):
        return frozenset([value])
    return frozenset(value) if isinstance(one, In) else None


def _bounds(one: Filter, value: Any) -> tuple[int, int] | None:
    if isinstance(one, GreaterThan):
        return value + 1, _UNBOUND
    if isinstance(one, GreaterThanOrEqual):
        return value, _UNBOUND
    if isinstance(one, LessThan):
        return 0, value
    if isinstance(one, LessThanOrEqual):
        return 0, value + 1
    return None


class PushDown:
    """Takes the conditions that the fetch can carry out; see the module for why it is no method."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.__func__ = DataSourceReader.pushFilters

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        """Give back those that Spark has to check itself."""
        return [one for one in filters if not self._bounds.take(one)]
