"""Locations in a text from a user, with an excerpt that points at them."""

from __future__ import annotations

from typing import Final, NamedTuple

from millstream.core.errors import InvalidSetting

_SHOWN_BEFORE: Final = 50
_SHOWN_MAX: Final = 100


class Place(NamedTuple):
    """Line and column, both counted from 1, and the line with marks below the location."""

    line: int
    column: int
    picture: str


def locate(text: str, start: int, end: int) -> Place:
    """Return the location of `start` up to `end`, exclusive."""
    start = min(max(start, 0), len(text))
    line_at = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", start)
    line_end = len(text) if line_end < 0 else line_end
    shown_at = max(line_at, start - _SHOWN_BEFORE)
    shown = _printable(text[shown_at : min(line_end, shown_at + _SHOWN_MAX)])
    width = max(1, min(end, line_end, shown_at + _SHOWN_MAX) - start)
    marks = " " * (start - shown_at) + "^" * width
    return Place(text.count("\n", 0, start) + 1, start - line_at + 1, f"  {shown}\n  {marks}")


def setting_error_at(about: str, text: str, start: int, end: int, reason: str) -> InvalidSetting:
    """Build the error for a setting whose text is invalid at a location."""
    place = locate(text, start, end)
    return InvalidSetting(f"{about}, line {place.line}, column {place.column}: {reason}\n{place.picture}")


def _printable(text: str) -> str:
    """Replace each unprintable character by one space, so that the marks stay aligned."""
    return "".join(character if character.isprintable() else " " for character in text)
