"""Start and end positions of a query: an end of the log, a time, or an offset for every partition."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from millstream.core.errors import InvalidSetting

OFFSET_LATEST: Final = -1
OFFSET_EARLIEST: Final = -2
"""Kafka's codes for the two ends of a partition, in JSON offsets and in lookups."""

Offsets = Mapping[str, Mapping[int, int]]
"""By topic and partition."""


@dataclass(frozen=True, slots=True)
class End:
    """One of the two ends of every partition."""

    offset: int


@dataclass(frozen=True, slots=True)
class ByTime:
    """The first record of every partition since a time."""

    timestamp_ms: int
    or_latest: bool


@dataclass(frozen=True, slots=True)
class Timestamps:
    """A time for every partition."""

    times_ms: Offsets
    or_latest: bool


@dataclass(frozen=True, slots=True)
class Named:
    """An offset for every partition; -2 is the earliest and -1 the latest."""

    offsets: Offsets


@dataclass(frozen=True, slots=True)
class FromLake:
    """The first message in the log or the landed table."""


Position = End | ByTime | Timestamps | Named | FromLake

EARLIEST: Final = End(OFFSET_EARLIEST)
LATEST: Final = End(OFFSET_LATEST)
EARLIEST_LANDED: Final = FromLake()


def parse_offsets(option: str, text: str, *, minimum: int = OFFSET_EARLIEST) -> Offsets:
    """Parse `{"orders": {"0": 23, "1": -1}}`."""
    if minimum >= 0:
        kind = "a JSON document"
    elif option.startswith("starting"):
        kind = "earliest, latest, earliest-landed or a JSON document"
    else:
        kind = "latest or a JSON document"
    return _parse(option, text, kind, minimum)


def parse_times(option: str, text: str) -> Offsets:
    """Parse `{"orders": {"0": 1700000000000}}`."""
    return _parse(option, text, "a JSON document", 0)


def _parse(option: str, text: str, kind: str, minimum: int) -> Offsets:
    try:
        document = json.loads(text)
        return {
            str(topic): {int(partition): _number(value, minimum) for partition, value in dict(numbers).items()}
            for topic, numbers in dict(document).items()
        }
    except (ValueError, TypeError) as error:
        example = '{"orders": {"0": 23, "1": 42}}'
        raise InvalidSetting(f"option {option} is {kind} such as {example}: {error}") from None


def _number(value: object, minimum: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{value!r} is not allowed here")
    return value
