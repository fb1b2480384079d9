"""A request in its newest form that remembers the version it came in, for APIs whose rules depend on it."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

M = TypeVar("M")


class Versioned(NamedTuple, Generic[M]):
    """A message and the version that the client speaks."""

    version: int
    message: M
