"""Files that are in one of two places: being committed, they are moved from the second to the first.

Those that were written anew take the name of the file whose rows they have, and until then that one is read.
"""

from __future__ import annotations

from typing import Any

from millstream.pipelines.lake.rewriting import first_name


class EitherPlace:
    """Opens files wherever they are now."""

    def __init__(self, one: Any, other: Any) -> None:
        self._one = one
        self._other = other

    def open_input_file(self, path: str) -> Any:
        """A file for reading; raises `FileNotFoundError` when it is nowhere."""
        shown = first_name(path)
        for place, name in ((self._one, shown), (self._other, path)):
            try:
                return place.open_input_file(name)
            except FileNotFoundError:
                continue
        # It may have been moved between the two looks.
        return self._one.open_input_file(shown)
