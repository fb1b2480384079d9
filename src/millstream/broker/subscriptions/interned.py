"""Texts that many messages share, as small numbers: who holds a lease, why a message was rejected."""

from __future__ import annotations


class Interned:
    """A number for each text, for as long as somebody refers to it."""

    __slots__ = ("_free", "_numbers", "_references", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}
        self._references: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, text: str) -> int | None:
        """The number of a text that is referred to."""
        return self._numbers.get(text)

    def references(self, text: str) -> int:
        """How many messages refer to a text."""
        number = self._numbers.get(text)
        return 0 if number is None else self._references[number]

    def hold(self, text: str, count: int) -> int:
        """The number of a text that so many more messages refer to."""
        number = self._numbers.get(text)
        if number is None:
            number = self._add(text)
        self._references[number] += count
        return number

    def drop(self, number: int, count: int) -> None:
        """So many messages no longer refer to it."""
        left = self._references[number] - count
        self._references[number] = left
        if left == 0:
            del self._numbers[self.texts[number]]
            self.texts[number] = ""
            self._free.append(number)

    def held(self) -> list[str]:
        """Every text that is referred to, in the order of the alphabet."""
        return sorted(self._numbers)

    def _add(self, text: str) -> int:
        if self._free:
            number = self._free.pop()
            self.texts[number] = text
        else:
            number = len(self.texts)
            self.texts.append(text)
            self._references.append(0)
        self._numbers[text] = number
        return number
