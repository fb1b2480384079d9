"""LIKE patterns: `%` matches any run of characters, `_` one character, and an escape makes the next one literal.

A text is matched in one pass: the parts between the `%` are searched from left to right, each at its first place after
the previous one, which finds a match whenever there is one. Only a part with `_` between two `%` is compared again at
every place; such parts must be short, so that the time per character is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import methodcaller

FLOATING_MAX = 64
"""The maximum length of a part that has `_` in it and `%` on both sides."""

ESCAPE = "\\"

Matches = Callable[[str], bool]


class InvalidPattern(ValueError):
    """The pattern cannot be used; says why."""


class _Part:
    """What stands between two `%`: characters, and places where any character may stand."""

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
        found = self._compiled.search(text, start, end)
        return -1 if found is None else found.end()

    def stands_at(self, text: str, at: int) -> bool:
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
                raise InvalidPattern(f"the escape character cannot precede {escaped!r}, only before %, _ and itself")
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
        case [whole]:
            return methodcaller("__eq__", whole)
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
            return len(text) == width and first.stands_at(text, 0)
        end = len(text) - last.width
        if len(text) < width or not first.stands_at(text, 0) or not last.stands_at(text, end):
            return False
        at = first.width
        for part in middle:
            at = part.find(text, at, end)
            if at < 0:
                return False
        return at <= end

    return matches
