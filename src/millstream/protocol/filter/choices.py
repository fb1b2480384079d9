"""The list of an IN, laid out so that looking a value up takes the same time however long the list is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream.protocol.filter.operation import FROM_TEXT, Truth
from millstream.protocol.filter.value import NUMBERS


class Choices:
    """Literals of one kind, and perhaps NULL."""

    def __init__(self, values: Sequence[Any]) -> None:
        present = [value for value in values if value is not None]
        self.has_null = len(present) < len(values)
        self.values = frozenset(present)
        kinds = {value.__class__ for value in present}
        # A text is compared with numbers as Spark does it: as a double if any of them is one.
        self._kind = float if float in kinds else next(iter(kinds), None)
        self._taken: dict[type, tuple[frozenset[Any], bool]] = {}
        if self._kind is str:
            for kind, take in FROM_TEXT.items():
                taken = [take(value) for value in present]
                self._taken[kind] = frozenset(taken) - {None}, None in taken

    def hold(self, value: Any) -> Truth:
        """Whether one of them equals a value, as SQL has it: NULL if it may."""
        if value is None:
            return None
        kind = value.__class__
        choices, unsure = self.values, self.has_null
        if kind is str and self._kind is not str:
            value = None if self._kind is None else FROM_TEXT[self._kind](value)
        elif kind is not str and self._kind is str:
            choices, unknown = self._taken.get(kind, (frozenset(), True))
            unsure = unsure or unknown
        elif kind is not self._kind and not (kind in NUMBERS and self._kind in NUMBERS):
            return None
        if value is None:
            return None
        if choices and kind in _HASHED and value in choices:
            return True
        return None if unsure else False


_HASHED = frozenset({str, int, float, bool})
