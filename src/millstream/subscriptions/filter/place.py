"""Places in the text of a filter, and errors that point at them."""

from __future__ import annotations

from millstream.model.errors import FilterError

_SHOWN_BEFORE, _SHOWN_MAX = 50, 100


def refusal(text: str, start: int, end: int, reason: str) -> FilterError:
    """The error for what stands in the text from `start` up to, not including, `end`."""
    start = min(max(start, 0), len(text))
    line_at = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", start)
    line_end = len(text) if line_end < 0 else line_end
    number, column = text.count("\n", 0, start) + 1, start - line_at + 1
    shown_at = max(line_at, start - _SHOWN_BEFORE)
    shown = _printable(text[shown_at : min(line_end, shown_at + _SHOWN_MAX)])
    width = max(1, min(end, line_end, shown_at + _SHOWN_MAX) - start)
    caret = " " * (start - shown_at) + "^" * width
    message = f"filter, line {number}, column {column}: {reason}\n  {shown}\n  {caret}"
    return FilterError(message, line=number, column=column, reason=reason)


def _printable(text: str) -> str:
    """One character for each, so that the caret stays in its place."""
    return "".join(character if character.isprintable() else " " for character in text)
