"""Files that are in one of two places: being committed, they are moved from the second to the first."""

from __future__ import annotations

from typing import Any


class EitherPlace:
    """Opens files wherever they are now."""

    def __init__(self, one: Any, other: Any) -> None:
        self._one = one
        self._other = other

    def open_input_file(self, path: str) -> Any:
        """A file for reading; raises `FileNotFoundError` when it is nowhere."""
        for place in (self._one, self._other):
            try:
                return place.open_input_file(path)
            except FileNotFoundError:
                continue
        # It may have been moved between the two looks.
        return self._one.open_input_file(path)
