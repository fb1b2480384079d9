"""Conversions between kinds, like Spark's ANSI casts.

Where those fail, the result here is None (NULL). Every function takes any value that a message can hold and never
raises.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from operator import methodcaller

FLOATING_MAX = 64
"""The maximum length of a part that has `_` in it and `%` on both sides."""

ESCAPE = "\\"

Matches = Callable[[str], bool]


class InvalidPattern(ValueError):
    """The pattern is not supported; the message says why.

    A text is matched in one pass: the parts between the `%` are searched from left to right, each at its first position
    after the previous one, which finds a match if one exists. Only a part with `_` between two `%` is compared at every
    position; such parts must be short, so that the time per character is bounded.
    """


class _Part:
    """The part between two `%`: characters, and places for any character."""

    def __init__(self, characters: list[str | None]) -> None:
        self.width = len(characters)
        self.plain = None if None in characters else "".join(map(str, characters))
        pattern = "".join("." if character is None else re.escape(character) for character in characters)
        self._compiled = re.compile(pattern, re.DOTALL)

    def find(self, text: str, start: int, end: int) -> int:
        """Return the end of its first occurrence from `start` that does not reach beyond `end`, or -1."""
        if self.plain is not None:
            at = text.find(self.plain, start, end)
            return at if at < 0 else at + self.width
        match = self._compiled.search(text, start, end)
        return -1 if match is None else match.end()

    def matches_at(self, text: str, at: int) -> bool:
        """Return whether it occurs at a position."""
        if self.plain is not None:
            return text.startswith(self.plain, at)
        return self._compiled.match(text, at) is not None


def compile_like(pattern: str, escape: str = ESCAPE) -> Matches:
    """Return a function that matches a text; raises `InvalidPattern`."""
    parts = [_Part(characters) for characters in _split(pattern, escape)]
    if any(part.plain is None and part.width > FLOATING_MAX for part in parts[1:-1]):
        raise InvalidPattern(f"between two % a part with _ in it has at most {FLOATING_MAX} characters")
    return _simple(parts) or _general(parts)


def _split(pattern: str, escape: str) -> list[list[str | None]]:
    parts: list[list[str | None]] = [[]]
    characters = iter(pattern)
    for character in characters:
        if character == escape:
            escaped = next(characters, None)
            if escaped is None:
                raise InvalidPattern("the pattern ends with its escape character")
            if escaped not in ("%", "_", escape):
                raise InvalidPattern(f"the escape character can precede only %, _ and itself, not {escaped!r}")
            parts[-1].append(escaped)
        elif character == "%":
            parts.append([])
        else:
            parts[-1].append(None if character == "_" else character)
    # Consecutive % mean the same as one.
    return [part for at, part in enumerate(parts) if part or at in (0, len(parts) - 1)]


def _simple(parts: list[_Part]) -> Matches | None:
    """Return a matcher for common patterns, without Python per text; None for others."""
    if any(part.plain is None for part in parts):
        return None
    match [part.plain for part in parts]:
        case [text]:
            return methodcaller("__eq__", text)
        case [prefix, ""]:
            return methodcaller("startswith", prefix)
        case ["", suffix]:
            return methodcaller("endswith", suffix)
        case ["", middle, ""]:
            return methodcaller("__contains__", middle)
    return None


def _general(parts: list[_Part]) -> Matches:
    first, *middle, last = parts if len(parts) > 1 else (parts[0], None)
    width = sum(part.width for part in parts)

    def matches(text: str) -> bool:
        if last is None:
            return len(text) == width and first.matches_at(text, 0)
        end = len(text) - last.width
        if len(text) < width or not first.matches_at(text, 0) or not last.matches_at(text, end):
            return False
        at = first.width
        for part in middle:
            at = part.find(text, at, end)
            if at < 0:
                return False
        return at <= end

    return matches


NUMBERS = frozenset({int, float})
INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1

_WHOLE = re.compile(r"[+-]?[0-9]{1,40}")
_DOUBLE = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[dDfF]?")
_MOMENT = re.compile(
    r"([0-9]{4})-([0-9]{1,2})-([0-9]{1,2})"
    r"(?:[T ]([0-9]{1,2}):([0-9]{1,2})(?::([0-9]{1,2})(?:\.([0-9]{1,9}))?)?"
    r"\s?(Z|UTC|[+-][0-9]{2}:[0-9]{2})?)?"
)
_TRUE, _FALSE = frozenset({"t", "true", "y", "yes", "1"}), frozenset({"f", "false", "n", "no", "0"})
_BLANKS = "".join(map(chr, (*range(33), 127)))
_TEXT_MAX = 400
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_SECOND_US = 1_000_000


def parse_integer(text: str) -> int | None:
    """Convert text to a 64-bit integer."""
    text = text.strip(_BLANKS)
    if not _WHOLE.fullmatch(text):
        return None
    return _within(int(text), INT64_MAX)


def double(text: str) -> float | None:
    text = text.strip(_BLANKS)
    if len(text) > _TEXT_MAX or not _DOUBLE.fullmatch(text):
        return None
    return finite(float(text.rstrip("dDfF")))


def boolean(text: str) -> bool | None:
    word = text.strip(_BLANKS).lower()
    if word in _TRUE:
        return True
    return False if word in _FALSE else None


def moment(value: object) -> int | None:
    """Convert text such as `2026-11-15 12:00:00` to a timestamp, by default in UTC; None for other values."""
    if value.__class__ is not str:
        return None
    match = _MOMENT.fullmatch(str(value).strip(_BLANKS))
    if match is None:
        return None
    year, month, day, hour, minute, second = (int(part or 0) for part in match.groups()[:6])
    microsecond = int((match[7] or "")[:6].ljust(6, "0"))
    try:
        at = datetime(year, month, day, hour, minute, second, microsecond, _zone(match[8]))
        return (at.astimezone(UTC) - _EPOCH) // _MICROSECOND
    except (ValueError, OverflowError):
        return None


def _zone(text: str | None) -> timezone:
    if text is None or text in ("Z", "UTC"):
        return UTC
    hours, minutes = int(text[1:3]), int(text[4:6])
    if hours > 18 or minutes > 59:
        raise ValueError(text)
    offset = timedelta(hours=hours, minutes=minutes)
    return timezone(-offset if text[0] == "-" else offset)


def moment_text(microseconds: int) -> str:
    """Write a timestamp as `moment` reads it."""
    return (_EPOCH + microseconds * _MICROSECOND).strftime("%Y-%m-%d %H:%M:%S.%fZ").rjust(27, "0")


def text_of(value: object) -> str | None:
    """Convert a value to text; None for objects and arrays."""
    kind = value.__class__
    if kind is str:
        return value  # type: ignore[return-value]
    if kind is bool:
        return "true" if value else "false"
    if kind is int:
        return str(value)
    return _double_text(value) if kind is float else None  # type: ignore[arg-type]


def _double_text(value: float) -> str:
    """Write a double as Java does."""
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return repr(value)
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    first, *rest = (str(digit) for digit in digits)
    return f"{'-' if sign else ''}{first}.{''.join(rest) or '0'}E{int(exponent) + len(rest)}"


def finite(value: float) -> float | None:
    """Return None for values beyond the range of a double."""
    return value if math.isfinite(value) else None


def _within(value: int, largest: int) -> int | None:
    return value if -largest - 1 <= value <= largest else None


def as_bigint(value: object) -> int | None:
    if isinstance(value, str):
        return parse_integer(value)
    return _within(int(value), INT64_MAX) if isinstance(value, int | float) else None


def as_int(value: object) -> int | None:
    number = as_bigint(value)
    return None if number is None else _within(number, INT32_MAX)


def as_double(value: object) -> float | None:
    if isinstance(value, str):
        return double(value)
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def as_boolean(value: object) -> bool | None:
    if isinstance(value, str):
        return boolean(value)
    return value != 0 if isinstance(value, int | float) else None


def as_timestamp(value: object) -> int | None:
    """CAST AS TIMESTAMP: of text, or of seconds since 1970."""
    if isinstance(value, str):
        return moment(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    microseconds = value * _SECOND_US
    if isinstance(microseconds, float) and not math.isfinite(microseconds):
        return None
    return _within(int(microseconds), INT64_MAX)


def seconds(microseconds: int | None) -> int | None:
    """CAST AS BIGINT of a timestamp."""
    return None if microseconds is None else microseconds // _SECOND_US


def fractional_seconds(microseconds: int | None) -> float | None:
    """CAST AS DOUBLE of a timestamp."""
    return None if microseconds is None else microseconds / _SECOND_US
