"""Places in the text of a filter, and errors that point at them."""

from __future__ import annotations

from millstream.core.errors import FilterError
from millstream.core.text_place import place_in


def refusal(text: str, start: int, end: int, reason: str) -> FilterError:
    """The error for what stands in the text from `start` up to, not including, `end`."""
    place = place_in(text, start, end)
    message = f"filter, line {place.line}, column {place.column}: {reason}\n{place.picture}"
    return FilterError(message, line=place.line, column=place.column, reason=reason)
