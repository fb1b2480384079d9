"""Places in a text that somebody wrote, shown so that its author finds them."""

from __future__ import annotations

from typing import Final, NamedTuple

from millstream.core.errors import InvalidSetting

_SHOWN_BEFORE: Final = 50
_SHOWN_MAX: Final = 100


class Place(NamedTuple):
    """A place: its line and column, both from 1 on, and the line with marks below it."""

    line: int
    column: int
    picture: str


def locate(text: str, start: int, end: int) -> Place:
    """What stands in the text from `start` up to, not including, `end`."""
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
    """The error for a setting that is a text, and wrong at a place."""
    place = locate(text, start, end)
    return InvalidSetting(f"{about}, line {place.line}, column {place.column}: {reason}\n{place.picture}")


def _printable(text: str) -> str:
    """One character for each, so that the marks stay in their places."""
    return "".join(character if character.isprintable() else " " for character in text)
