"""Regular expressions that members subscribe with, and the topics that they match.

An expression must match the whole name. Internal topics are never matched; subscribe to them by name.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from millstream.broker.groups.consumer.assignor import TopicView
from millstream.core.regex import compile_regex

KEPT_MAX: Final = 256
"""The number of expressions whose matches are cached."""


class _Known:
    """One expression, and the names that it was matched against."""

    __slots__ = ("compiled", "matched", "position")

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.matched: set[str] = set()
        self.position = 0


class Expressions:
    """The expressions of all groups. A name is matched against an expression once, not each time topics change."""

    def __init__(self, topics: TopicView) -> None:
        self._topics = topics
        self._version: int | None = None
        # Every name ever seen, in order; the position of an expression says how many it was matched against.
        self._names: list[str] = []
        self._seen: set[str] = set()
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def check(self, expression: str) -> None:
        """Raise `InvalidRegex` for an invalid expression."""
        self._find(expression)

    def matches(self, expression: str) -> frozenset[str]:
        """Return the topics that an expression matches now."""
        self._catch_up()
        known = self._find(expression)
        for name in self._names[known.position :]:
            if known.compiled.fullmatch(name) is not None:
                known.matched.add(name)
        known.position = len(self._names)
        return frozenset(name for name in known.matched if self._topics.get(name) is not None)

    def _find(self, expression: str) -> _Known:
        known = self._known.get(expression)
        if known is None:
            known = self._known[expression] = _Known(compile_regex(expression))
            if len(self._known) > KEPT_MAX:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(expression)
        return known

    def _catch_up(self) -> None:
        """Add new topic names; start over when most of the known ones were deleted."""
        if self._version == self._topics.version:
            return
        self._version = self._topics.version
        present = [topic.name for topic in self._topics.all() if not topic.is_internal]
        if len(self._names) > 2 * len(present) + KEPT_MAX:
            self._names.clear()
            self._seen.clear()
            for known in self._known.values():
                known.matched.clear()
                known.position = 0
        new = [name for name in present if name not in self._seen]
        self._names += new
        self._seen.update(new)
